"""Adapters are put on the layers that rows of text train: not on towers, and not on what only selects keys."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import seeing
import torch
from jobs import adapter_weights, sampled
from messages import refusal
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING

import finetune
from finetune.config import AdapterSection, ModelSection
from finetune.errors import ArtifactError, ConfigError
from finetune.model import build
from finetune.model.adapters import adapter, starting
from finetune.model.base import load_architecture
from finetune.model.structure import linear_layers
from finetune.storage import weight_files

_ROW = 150  # tokens: more than DeepSeek V4 compresses into one
# Not composite, but with attention to an encoder, or to keys that an indexer selects.
_BESIDE = {"bart", "whisper", "deepseek_v32", "deepseek_v4", "glm_moe_dsa"}
# Composite, but no model of defaults made small.
_NOT_BUILT = {
    "blt": "takes bytes", "dbrx": "parts without a model", "dots3_note": "sizes that must agree",
    "gemma3n": "needs timm", "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model", "musicgen": "no text", "musicgen_melody": "no text",
    "qwen4_exp": "no defaults",
}  # fmt: skip
COMPOSITE = [name for name in every_architecture.types() if CONFIG_MAPPING[name].sub_configs or name in _BESIDE]


_BUILT = sorted(set(COMPOSITE) - _NOT_BUILT.keys())
_OFTEN = {
    "bart", "deepseek_v4", "fuyu", "gemma3", "gemma4", "glm_moe_dsa", "llama4", "mllama", "qwen3_5_moe", "whisper",
}  # fmt: skip


def base(model_type: str) -> Any:
    return every_architecture.model(every_architecture.config(model_type))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(_BUILT, *(name for name in _BUILT if name in _OFTEN)))
def test_every_adapter_of_a_composite_model_has_a_gradient(name: str) -> None:
    model = base(name)
    head = model.get_output_embeddings()
    layers = ((each, module) for each, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    linear = {each for each, module in layers if module is not head}
    fused = {path for path, _, _ in adapter.experts.weights(model)}
    section = AdapterSection(rank=2)
    left_out = linear_layers.read_directly(model) | linear_layers.untrained(model)
    assert sum(adapter.left_out(model, section).values()) == len(left_out)
    routers = set(adapter.experts.routers(model))
    adapted = adapter.attach(model, section, "x", 0)
    weights = {part: weight for part, weight in adapted.named_parameters() if weight.requires_grad}
    for part, weight in weights.items():
        if "lora_B" in part:  # else A has no gradient in the first step
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.randint(4, every_architecture.WORDS, (2, _ROW), generator=torch.Generator().manual_seed(0))
    logits = adapted(input_ids=ids, use_cache=False).logits[:, -_ROW:-1]
    cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert not [part for part, weight in weights.items() if weight.grad is None or not weight.grad.any()]
    fused = {path for path in fused if path.rpartition(".")[0] not in left_out}
    assert len(weights) // 2 == len(linear - left_out - routers) + len(fused)


def test_untested_composite_models_are_listed() -> None:
    known = _NOT_BUILT.keys() & set(CONFIG_MAPPING)  # older versions of transformers lack the newest
    assert set(COMPOSITE) >= known
    assert known


def _towers(model_type: str) -> int:
    return len(linear_layers.untrained(base(model_type)))


def test_what_rows_of_text_do_not_train_is_found_without_weights() -> None:
    """And not taken for more than it is: a Llama has none."""
    assert _towers("llama") == _towers("qwen3_moe") == 0
    assert linear_layers.untrained(base("mistral3")) == {
        name
        for name, module in base("mistral3").named_modules()
        if isinstance(module, torch.nn.Linear) and "multi_modal_projector" in name
    }
    indexers = linear_layers.untrained(base("glm_moe_dsa"))
    assert indexers
    assert all(".indexer." in name for name in indexers)


@pytest.mark.parametrize("validated", [True, False])
def test_a_programs_choice_whether_distributions_are_validated_is_kept(validated: bool) -> None:
    torch.distributions.Distribution.set_default_validate_args(validated)
    try:
        with linear_layers._unvalidated():
            torch.distributions.Bernoulli(probs=2.0)
        with contextlib.nullcontext() if not validated else pytest.raises(ValueError, match="invalid values"):
            torch.distributions.Bernoulli(probs=2.0)
    finally:
        torch.distributions.Distribution.set_default_validate_args(True)


def section(*targets: str, **more: Any) -> AdapterSection:
    return AdapterSection(rank=2, targets=list(targets), **more)


@pytest.mark.parametrize("target", ["linear_1", r".*projector.*\.linear_2"])
def test_targets_beside_the_text_alone_are_refused(target: str) -> None:
    with refusal(ConfigError, "rows of text train no layer of Mistral3For"):
        adapter.lora_config(base("mistral3"), section(target))


@pytest.mark.parametrize("target", ["q_proj", r".*\.q_proj"])
@pytest.mark.parametrize("name", ["bart", "gemma4"])  # attention to an encoder; a tower's wrapped layers of that name
def test_a_target_in_both_adapts_only_the_text_layers_with_a_note(name: str, target: str) -> None:
    model, chosen = base(name), section(target, ranks={target: 4})
    adapted = adapter.attach(model, chosen, "x", 0)
    layers = [part for part, _ in adapted.named_modules() if part.endswith("q_proj.lora_A")]
    assert layers
    assert all("self_attn" in part and "tower" not in part for part in layers)
    skipped = adapter.left_out(model, chosen)
    assert skipped == {"that rows of text do not train": 2} if name == "bart" else skipped == {}


def test_layers_of_a_frozen_model_of_images_are_reported_as_such(tmp_path: Path) -> None:
    seen = ModelSection(name=str(seeing.base(tmp_path, "qwen3_vl")), vision="frozen")
    model = build.weightless(seen, load_architecture(seen))
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    tower = [name for name in linear if ".visual." in name]
    assert 0 < len(tower) < len(linear)
    reported = {"of the model of images, which stay as they are": len(tower)}
    assert adapter.left_out(model, AdapterSection()) == reported
    assert adapter.left_out(model, section("q_proj")) == {}


@pytest.mark.slow
@pytest.mark.parametrize("targets", sampled(["all-linear", [r".*(q_proj|linear_1)"]], "all-linear"))
def test_layers_left_out_are_in_neither_forecast_nor_files_and_are_reported(
    targets: Any, tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command reads the adapter, of which the config's names alone do not tell the layers."""
    base("mistral3").save_pretrained(tmp_path / "base")
    config = quick(
        f"model.name={tmp_path / 'base'}", "model.tokenizer=builtin:tiny-llama", "adapter.rank=2", "data.eval=none",
        "training.max_steps=1", "memory.check=warn",
    ).changed({"adapter.targets": targets})  # fmt: skip
    run = finetune.train(config).run
    said = " ".join(capsys.readouterr().out.split())
    assert f"on {'3 layers' if targets == 'all-linear' else '1 layers'} that rows of text do not train" in said
    shapes = weight_files.shapes(run.adapter / "adapter_model.safetensors")
    assert all("language_model" in name for name in shapes)
    forecast = json.loads((run.path / "forecast.json").read_text())
    assert forecast["categories"]["adapter"] == sum(4 * math.prod(shape) for shape in shapes.values())
    finetune.merge(run)
    again = config.adapter.model_copy(update={"start_from": str(run.adapter), "alpha": 1.0})
    with refusal(ConfigError, "adapter.alpha"):
        starting.check(base("mistral3"), again)


@pytest.mark.long
def test_a_finished_run_of_an_earlier_version_that_adapted_a_tower_is_published_without_it(
    tmp_path: Path, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base("mistral3").save_pretrained(tmp_path / "base")
    config = quick(f"model.name={tmp_path / 'base'}", "model.tokenizer=builtin:tiny-llama")
    with monkeypatch.context() as earlier:
        earlier.setattr(linear_layers, "untrained", lambda model: frozenset())
        run = finetune.train(config).run
    before = adapter_weights(run)
    with refusal(ArtifactError, "finetune train` again, which publishes this run's adapter"):
        finetune.merge(run)
    finetune.train(config)
    after = adapter_weights(run)
    assert after.keys() == {name for name in before if "projector" not in name} != before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    finetune.merge(run)


@pytest.mark.parametrize(
    ("name", "said"),
    [("mistral3", r"`model\.multi_modal_projector\.\S+`, which rows of text do"), ("gemma3", r"vision_tower")],
)
def test_an_adapter_beside_the_text_is_refused_as_a_start(name: str, said: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    whole = AutoModelForImageTextToText.from_config(every_architecture.config(name))
    get_peft_model(whole, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(
        tmp_path, save_embedding_layers=False
    )
    with pytest.raises(ConfigError, match=said):
        starting.check(base(name), AdapterSection(rank=2, alpha=8, start_from=str(tmp_path)))
