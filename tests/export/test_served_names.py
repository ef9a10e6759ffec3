"""The exported adapter has the names of the base's own files, by which servers find its layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import torch
from jobs import BF16, logits, sampled, save_base
from messages import refusal
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import finetune
from finetune.config import AdapterSection, ModelSection, QuantizationSection
from finetune.errors import ConfigError
from finetune.export import adapter_export, server_names
from finetune.model import base as model_base
from finetune.model.adapters import adapter, adapter_files
from finetune.report.terminal import Terminal
from finetune.storage import weight_files

COMPOSITE = ("qwen3_5", "qwen3_5_moe")
JOB = ["quantization.kind=none", "training.precision=fp32", "training.learning_rate=5e-3", "data.eval=none"]


def base_at(folder: Path, name: str, tiny_base: Path) -> Path:
    """A base with the built-in one's tokenizer; a composite one as it is published, with its vision tower."""
    torch.manual_seed(0)
    made = AutoModelForImageTextToText if name in COMPOSITE else AutoModelForCausalLM
    return save_base(made.from_config(every_architecture.config(name), dtype=torch.float32), folder, tiny_base)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*COMPOSITE, "glm4_moe"], "qwen3_5_moe", "glm4_moe"))
def test_servers_find_every_layer_and_peft_reads_the_run(
    name: str, quick: Any, tmp_path: Path, tiny_base: Path
) -> None:
    base = base_at(tmp_path / "base", name, tiny_base)
    run = finetune.train(quick(*JOB, f"model.name={base}", "adapter.expert_rank=0")).run
    result = finetune.export_model(run, "adapter", terminal=Terminal(quiet=True))
    assert result["error"] <= result["bound"]
    served = load_file(Path(result["path"]) / adapter_files.WEIGHTS)
    in_files = weight_files.shapes(base / "model.safetensors")
    for adapted, tensor in served.items():
        layer = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.weight", adapted)
        out, into = in_files[f"{layer[1]}.weight"]
        assert tensor.shape == ((result["rank"], into) if layer[2] == "A" else (out, result["rank"]))
    if name in COMPOSITE:
        assert all(".language_model." in adapted for adapted in served)
    assert "servers" in " ".join(result["known_differences"])
    # What vLLM and SGLang read of the config; the latter takes the last part of each name.
    said = json.loads((Path(result["path"]) / adapter_files.CONFIG).read_text())
    assert said["r"] == said["lora_alpha"]
    assert {target.rpartition(".")[2] for target in said["target_modules"]} == set(result["targets"])
    # adapter/ is on the text model that AutoModelForCausalLM loads, for PEFT.
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    alone = PeftModel.from_pretrained(plain, str(run.adapter))
    trained = adapter_files.load_adapter(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), run.adapter, run.config().adapter
    )
    torch.testing.assert_close(logits(alone), logits(trained), rtol=1e-4, atol=1e-4)
    assert (logits(alone) - before).norm() > 1e-3 * before.norm()
    assert len(adapter_files.weights(alone)) == len(served) == len(load_file(run.adapter / adapter_files.WEIGHTS))


_WHOLE = ["qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3", "llama4", "qwen3_vl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    sampled(
        [*((name, "today") for name in _WHOLE), ("gemma3", "earlier"), ("mistral3", "earlier")],
        ("qwen3_5_moe", "today"), ("llama4", "today"), ("mistral3", "earlier"),
    ),
)  # fmt: skip
def test_the_exported_adapter_is_found_in_the_whole_of_a_composite_checkpoint(
    name: str, published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PEFT on transformers' class for all of it, to the logits, and by vLLM's rules; whatever the files' names."""
    # transformers 5.24 reads Llama 4's images of the output of its language model, which has none.
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    torch.manual_seed(0)
    config = every_architecture.config(name)
    if name == "mistral3":
        config.text_config.num_hidden_layers = 3  # so many layers that PEFT looks for shorter names of them
    made = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    made.save_pretrained(tmp_path / "base")
    if published == "earlier":
        file = tmp_path / "base" / "model.safetensors"
        old = {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head", "model.": ""}
        save_file({_renamed(key, old): tensor for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    section = ModelSection(name=str(tmp_path / "base"))
    architecture = model_base.load_architecture(section)
    base = model_base.load_base(
        section, QuantizationSection(kind="none"), architecture, attention="eager", dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    adapted = adapter.attach(base, AdapterSection(rank=2, expert_rank=0), section.name, seed=0)
    for weight in adapter_files.weights(adapted).values():
        torch.nn.init.normal_(weight, std=0.1)
    job = BF16.changed({"model.name": section.name, "model.weights": "pretrained"})
    names, pairs = adapter_export.served_names(*adapter_export.file_groups(job.model)), adapter_export.plain(adapted)
    renamed = {layer: adapter_export._served(names, layer) for layer in pairs}
    adapter_export.write(pairs, renamed, adapted.peft_config["default"], section.name, tmp_path / "adapter")
    files = weight_files.shapes(tmp_path / "base" / "model.safetensors")
    assert server_names.served(renamed.values(), files, architecture.model_type) == len(pairs) > 0
    whole = AutoModelForImageTextToText.from_pretrained(section.name, dtype=torch.float32)
    before = logits(whole)
    loaded = PeftModel.from_pretrained(whole, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(loaded), logits(adapted), rtol=1e-4, atol=1e-4)
    assert (logits(loaded) - before).norm() > 1e-3 * before.norm()


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(prefix, "") + name.removeprefix(prefix)


def test_an_adapter_that_a_server_would_ignore_is_refused() -> None:
    """As PEFT saves it for the text model of Qwen3.5 (vllm#48019)."""
    files = [f"model.language_model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)]
    trained = [f"model.layers.{layer}.mlp.up_proj" for layer in range(2)]
    with refusal(ConfigError, "`model.layers.0.mlp.up_proj`"):
        server_names.served(trained, files, "qwen3_5")
    with refusal(ConfigError, "of the 1 layers that this adapter is on, a server"):
        server_names.served(["model.layers.0.mlp.experts"], ["model.layers.1.mlp.experts.down_proj"], "gpt_oss")


def test_a_prefix_that_files_lack_is_kept_and_a_layer_without_a_weight_in_the_files_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", vocab_size=64, hidden_size=16, n_layer=1))
    model.transformer.save_pretrained(tmp_path)
    job = BF16.changed({"model.name": str(tmp_path), "model.weights": "pretrained"})
    names = adapter_export.served_names(*adapter_export.file_groups(job.model))
    layer = "transformer.h.0.mlp.dense_h_to_4h"
    assert "h.0.mlp.dense_h_to_4h.weight" in weight_files.shapes(tmp_path / "model.safetensors")
    assert adapter_export._served(names, layer) == layer
    with refusal(ConfigError, "transformer.h.9"):
        adapter_export._served(names, "transformer.h.9.mlp")
