"""The merge from file to file: bit for bit what merging in memory gives, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config import AdapterSection, Config
from finetune.export import shards
from finetune.export.bases import Bases, Onto
from finetune.model import adapter, eight_bit, identity
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.settings import load_config

CPU = torch.device("cpu")
IDS = torch.arange(3, 35)[None]
_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 8},
    "phi3": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, "head_dim": 8, "moe_intermediate_size": 16},
    "gpt_oss": {**_EXPERTS, "head_dim": 8},
}
VARIANTS: dict[str, tuple[str, list[str], Onto]] = {
    "lora": ("llama", [], "16-bit"),
    "quantized twice": ("llama", ["quantization.double=true"], "quantized"),
    "8 bits": ("llama", ["quantization.kind=int8"], "quantized"),
    "rslora, biases": ("qwen2", ["adapter.rslora=true", "adapter.targets=[q_proj, v_proj, down_proj]"], "16-bit"),
    "dora, float16": ("gemma2", ["adapter.dora=true", "training.precision=fp16"], "16-bit"),
    "dora, quantized": ("phi3", ["adapter.dora=true"], "quantized"),
    "pissa, bfloat16": ("llama", ["adapter.init=pissa", "adapter.dtype=bfloat16", "quantization.kind=none"], "16-bit"),
    "loftq": ("qwen2", ["adapter.init=loftq"], "quantized"),
    "trained embeddings": ("qwen2", ["adapter.extra_modules=[embed_tokens, norm]"], "16-bit"),
    "trained head": ("gemma2", ["adapter.extra_modules=[lm_head]"], "quantized"),
    "experts": (
        "mixtral",
        ["adapter.targets=[q_proj, experts.gate_up_proj, experts.down_proj]", "quantization.kind=int8"],
        "16-bit",
    ),
    "quantized experts": ("qwen3_moe", [], "quantized"),
    "transposed experts": (
        "gpt_oss", ["adapter.targets=[experts.gate_up_proj, experts.down_proj]", "quantization.kind=none"], "16-bit",
    ),
}  # fmt: skip


def base_at(folder: Path, name: str, tiny_base: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model in three shards, with the built-in base's tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**_SIZES, **ARCHITECTURES[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    size = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // 3)
    for file in tiny_base.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return folder


def architecture_of(config: Config) -> Any:
    return load_architecture(config.model)


def base_of(config: Config, dtype: torch.dtype) -> Any:
    return Blueprint(config.model, config.quantization, load_architecture(config.model), "eager", dtype).load(CPU)


def write_adapter(config: Config, folder: Path) -> None:
    """An adapter as training publishes it, with weights that matter."""
    plain = config.changed({"quantization.kind": "none", "quantization.double": None})
    section: AdapterSection = adapter.published(config.adapter)
    model = adapter.attach(base_of(plain, torch.float32), section, config.model.name, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapter.weights(model).values():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(str(folder), save_embedding_layers=False)


def merged_in_memory(config: Config, folder: Path, onto: Onto, dtype: torch.dtype) -> Any:
    """PEFT's merge of the whole model in float32, rounded once."""
    plain = config.changed({"quantization.kind": "none", "quantization.double": None})
    if onto == "16-bit":
        base = base_of(plain, torch.float32)
    elif config.quantization.kind == "int8":
        base, trained = base_of(plain, torch.float32), base_of(config, dtype)
        for name, layer in trained.named_modules():
            if isinstance(layer, eight_bit.WeightOnly):
                weight = eight_bit.dequantized(layer.weight.data, layer.weight.SCB, dtype)
                base.get_submodule(name).weight.data = weight.float()
    else:
        base = base_of(config, dtype).dequantize(dtype).float()
    merged = adapter.load_adapter(base, folder, config.adapter).merge_and_unload()
    for weight in merged.parameters():  # buffers, such as rotary frequencies, stay in float32
        weight.data = weight.data.to(dtype)
    return merged


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


# PEFT warns of what the merge takes care of.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Input and output embeddings are no")
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_equals_the_merge_in_memory_bit_for_bit(variant: str, tiny_base: Path, tmp_path: Path) -> None:
    name, changes, onto = VARIANTS[variant]
    base = base_at(tmp_path / "base", name, tiny_base)
    job = ["configs/tiny_cpu.yaml", f"model.name={base}", "training.precision=bf16", "data.train=x.jsonl", *changes]
    config = load_config(Path(job[0]), job[1:])
    folder, target = tmp_path / "adapter", tmp_path / "merged"
    write_adapter(config, folder)
    bases = Bases(config, folder, identity.loaded_files(base), CPU)
    target.mkdir()
    shards.write_weights(bases.merging(onto), target)
    bases.merged_architecture.save_pretrained(target)

    expected = merged_in_memory(config, folder, onto, bases.dtype)
    model, report = AutoModelForCausalLM.from_pretrained(
        target, dtype=bases.dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = dict(expected.named_parameters())
    assert [name for name, weight in model.named_parameters() if not torch.equal(weight, weights[name])] == []
    assert torch.equal(logits(model), logits(expected))
    untrained = AutoModelForCausalLM.from_pretrained(base, dtype=bases.dtype, attn_implementation="eager")
    assert not torch.equal(logits(model), logits(untrained))
    assert {file.name for file in target.glob("*.safetensors")} == {file.name for file in base.glob("*.safetensors")}
    index = [json.loads((place / "model.safetensors.index.json").read_text())["weight_map"] for place in (base, target)]
    added = index[1].keys() - index[0].keys()
    assert added == ({"lm_head.weight"} if "trained" in variant else set())
    assert index[1].items() >= index[0].items()
