"""An adapter to start from: that of another run, what is said of one that does not fit, and what a run keeps of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import BF16, metric
from messages import refusal
from safetensors.torch import load_file, save_file

import finetune
from finetune.config import AdapterSection
from finetune.errors import ArtifactError, ConfigError
from finetune.export import card
from finetune.export.finished_run import FinishedRun
from finetune.model import build
from finetune.model.adapters import adapter_files, starting
from finetune.model.adapters.adapter import attach
from finetune.model.base import load_architecture

THEIRS = AdapterSection(rank=4, alpha=6, targets=["q_proj", "v_proj"])


def base() -> Any:
    config = BF16.changed({"quantization.kind": "none"})
    return build.blueprint(config, load_architecture(config.model), "eager").weightless()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as PEFT writes it, on the built-in base."""
    folder = tmp_path_factory.mktemp("theirs")
    config = BF16.changed({"model.weights": "random", "quantization.kind": "none"})
    blueprint = build.blueprint(config, load_architecture(config.model), "eager")
    attach(blueprint.load(torch.device("cpu")), THEIRS, "x", 1).save_pretrained(str(folder))
    return folder


def changed(saved: Path, folder: Path, **settings: Any) -> AdapterSection:
    """A section that starts from a copy whose adapter_config.json has other settings."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return THEIRS.model_copy(update={"start_from": str(folder)})


def test_all_keys_to_set_for_an_adapter_are_named_at_once(saved: Path) -> None:
    starting.check(base(), THEIRS.model_copy(update={"start_from": str(saved), "dropout": 0.1}))
    needed = r"set `adapter.rank: 4`, `adapter.alpha: 6(\.0)?`, `adapter.targets: \[q_proj, v_proj\]`$"
    with pytest.raises(ConfigError, match=needed):
        starting.check(base(), AdapterSection(start_from=str(saved)))


def test_pefts_null_for_extra_modules_is_an_empty_list(saved: Path) -> None:
    section = THEIRS.model_copy(update={"start_from": str(saved), "extra_modules": ["norm"]})
    with refusal(ConfigError, "adapter.extra_modules"):
        starting.check(base(), section)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"alpha_pattern": {"q_proj": 3}}, r"`alpha_pattern: .*, which has no counterpart here"),
        ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights: .*no counterpart"),
        ({"use_dora": True}, "set `adapter.dora: true`"),
    ],
)
def test_settings_without_a_counterpart_are_refused(
    settings: dict[str, Any], why: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        starting.check(base(), changed(saved, tmp_path, **settings))


def test_layers_and_shapes_are_those_of_the_tensors(saved: Path, tmp_path: Path) -> None:
    section, file = changed(saved, tmp_path), tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    some = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    save_file(some, file)
    with refusal(ConfigError, "`adapter.targets`", "layers.0"):
        starting.check(base(), section)
    save_file({name: tensor[:, :8].contiguous() for name, tensor in tensors.items()}, file)
    with refusal(ConfigError, "`model.name`"):
        starting.check(base(), section)
    save_file({name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}, file)
    with refusal(ConfigError, "`model.name`", "model.layers.0.self_attn.q"):
        starting.check(base(), section)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8", "none"])
def test_dora_starts_on_a_base_of_each_kind_of_quantization(kind: str, tmp_path: Path) -> None:
    """What is checked before weights are loaded takes none; the magnitudes are those of the file."""
    config = BF16.changed({"model.weights": "random", "quantization.kind": kind})
    blueprint = build.blueprint(config, load_architecture(config.model), "eager")
    theirs = THEIRS.model_copy(update={"dora": True, "extra_modules": ["norm"]})
    attach(blueprint.load(torch.device("cpu")), theirs, "x", 1).save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    section = theirs.model_copy(update={"start_from": str(tmp_path)})
    blueprint.check(section)
    model = build.trainable(
        blueprint.load(torch.device("cpu")), config.model, section, config.memory, seed=2, device_type="cpu"
    )
    started = adapter_files.weights(model)
    assert started.keys() == tensors.keys()
    assert all(torch.equal(weight.float(), tensors[name]) for name, weight in started.items())


def test_a_damaged_adapter_and_a_different_one_are_different_errors(saved: Path, tmp_path: Path) -> None:
    section = changed(saved, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x00" * 64)
    with refusal(ArtifactError, "adapter_model"):
        starting.check(base(), section)
    for place, why in ((tmp_path / "none", "no such folder"), (tmp_path.parent, "no adapter here")):
        with pytest.raises(ArtifactError, match=why):
            starting.check(base(), THEIRS.model_copy(update={"start_from": str(place)}))


@pytest.mark.slow
def test_a_run_starts_where_another_ended_and_resumes_without_it(quick, tmp_path: Path) -> None:
    first = finetune.train(quick("training.max_steps=2", run="first")).run
    start = f"adapter.start_from={first.adapter}"
    run = finetune.train(quick(start, "training.max_steps=1")).run
    before = metric(first, "eval_loss")
    assert metric(run, "eval_loss")[0] == before[-1] < before[0]
    kept = starting.sha256(AdapterSection(start_from=str(first.adapter)))
    assert [one["start_from"] for one in run.events() if one["event"] == "started"] == [
        {"name": str(first.adapter), "sha256": kept}
    ]
    text = card.model_card(FinishedRun(run, run.config()), {"format": "adapter"}, "an adapter")
    assert f"`adapter` (sha256 {kept})" in text

    (first.adapter / "fingerprint.json").write_text(json.dumps({"tokenizer": "0" * 64, "base": None}))
    with refusal(ArtifactError, "trained with another tokenizer"):
        finetune.train(quick(start, run="other"))
    shutil.rmtree(first.path)
    resumed = finetune.train(quick(start, "training.max_steps=2")).run
    assert [line["step"] for line in resumed.metrics() if "loss" in line] == [1, 2]
    with refusal(ConfigError, "adapter.start_from"):
        finetune.train(quick("training.max_steps=2"))
