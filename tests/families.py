"""This year's architectures, made tiny: a step of each here beside plain transformers and PEFT, row by row."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import every_architecture
import torch
from jobs import BF16
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from finetune import kernels
from finetune.config import AdapterSection, MemorySection, ModelSection, QuantizationSection
from finetune.data.batching import MicroBatching
from finetune.model import build, skeleton
from finetune.model.attention import backends, packing
from finetune.model.source import catalog
from finetune.objectives import log_probs, supervised
from finetune.runtime import patches
from finetune.training import probe_table
from finetune.training.collator import StepCollator
from finetune.training.probe_table import Subject

CPU = torch.device("cpu")
FAMILIES = {
    "Qwen3.5, 3.6 and 3.8": "qwen3_5", "their mixtures": "qwen3_5_moe", "Gemma 4": "gemma4", "GLM-5": "glm_moe_dsa",
    "DeepSeek V4": "deepseek_v4", "gpt-oss": "gpt_oss", "SmolLM3": "smollm3", "Mistral Small 3": "mistral3",
    "Ministral 3": "ministral3", "Granite 4": "granitemoehybrid", "OLMo 3": "olmo3", "Phi-4": "phi3",
    "Llama 4": "llama4", "Nemotron": "nemotron", "Nemotron Nano": "nemotron_h", "Kimi K2": "deepseek_v3",
    "MiniMax": "minimax", "MiniMax M2": "minimax_m2", "Gemma 3": "gemma3",
}  # fmt: skip
"""The `model_type` of each family's checkpoints."""
ROWS = (40, 23, 31)
"""Tokens of the rows of a step; the first third of each is not trained."""

Gradients = dict[str, torch.Tensor]


def rows(lengths: Sequence[int] = ROWS) -> list[dict[str, list[int]]]:
    """Rows of these lengths as they are collated."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(4, every_architecture.WORDS, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [-100] * (len(ids) // 3) + ids[len(ids) // 3 :]} for ids in made]


def architecture(model_type: str) -> Any:
    """A tiny config of the architecture, without the load-balancing loss of its experts."""
    config = every_architecture.config(model_type)
    text = config.get_text_config()
    text.router_aux_loss_coef = 0.0
    return config


def adapted(config: Any, *, packed: bool, recomputed: bool) -> Any:
    """The model of a job, in float32 with random weights; the adapter's update is not zero."""
    attention, _ = backends.choose("auto", config, "cpu", "fp32", packed=packed, longest=max(ROWS))
    torch.manual_seed(0)
    base = skeleton.random_base(
        config, QuantizationSection(kind="none"), attention=attention, dtype=torch.float32, device=CPU
    )
    for weight in base.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.1)
    for attention_ in base.modules():
        # Gemma 4 scales no scores: with random keys they would be large, and multiply the rounding of a sum.
        if getattr(attention_, "scaling", None) == 1.0 and hasattr(attention_, "q_norm"):
            attention_.q_norm.weight.data.mul_(attention_.head_dim**-0.5)
    memory = MemorySection(checkpointing="all" if recomputed else "none")
    model = build.trainable(base, ModelSection(), AdapterSection(rank=2), memory, seed=0, device_type="cpu")
    config_ = BF16.changed({"data.packing": packed})
    attached = kernels.attach(model, "auto", triton=True, without=[])
    probe_table.run("fused", Subject(config_, model, attached))
    probe_table.run("built", Subject(config_, model))
    log_probs.attach(model)
    probe_table.run("scoring", Subject(config_, model))
    for part in _adapted(model).values():
        torch.nn.init.normal_(part.lora_B["default"].weight, std=0.02)
    return model.train()


def step(model: Any, *, packed: bool) -> tuple[float, Gradients]:
    """Loss and gradients of a step of `ROWS` in one micro-batch, as training takes it."""
    batch = StepCollator(MicroBatching(len(ROWS), packed=packed), 3).micro_batch(rows())
    batch.pop("attention_mask", None)
    with packing.known(batch), log_probs.tiles(64, fused=True):
        total, count = supervised(model, batch)
        (total / count).backward()
    return float(total.detach() / count), _gradients(model)


def plain_step(config: Any, model: Any) -> tuple[float, Gradients]:
    """The same by plain transformers and PEFT, with the weights of `model`: each row by itself, without padding."""
    known = (
        AutoModelForImageTextToText if catalog.is_whole(config, catalog.model_class(config)) else AutoModelForCausalLM
    )
    plain = known.from_config(config, attn_implementation="eager", dtype=torch.float32)
    ours = model.peft_config["default"]
    linear = [name for name, part in _adapted(model).items() if not isinstance(part, ParamWrapper)]
    settings = LoraConfig(
        r=2, lora_alpha=ours.lora_alpha, target_modules=linear, target_parameters=ours.target_parameters,
        rank_pattern=ours.rank_pattern,
    )  # fmt: skip
    with (
        patches.CONVERT_ADAPTER_CONFIG.by(lambda *args, **kwargs: None),  # takes a linear layer's name for experts
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The following rank_pattern keys did not match")  # parameters do
        theirs = get_peft_model(plain, settings)
    theirs.load_state_dict(model.state_dict(), strict=False)  # a whole composite model has towers as well
    total, count = torch.zeros(()), 0
    for row in rows():
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        logits = theirs(input_ids=ids, use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits, labels[0, 1:], reduction="sum")
        count += int((labels[0, 1:] != -100).sum())
    (total / count).backward()
    return float(total.detach() / count), _gradients(theirs)


def _adapted(model: Any) -> dict[str, Any]:
    """The adapted layers, linear or of experts, by their names in the base."""
    return {name: part for name, part in model.get_base_model().named_modules() if isinstance(part, LoraLayer)}


def _gradients(model: Any) -> Gradients:
    """Of the layers that the rows reach: some of DeepSeek V4's wait for longer ones."""
    weights = {
        f"{name}.{matrix}": getattr(part, matrix)["default"].weight
        for name, part in _adapted(model).items()
        for matrix in ("lora_A", "lora_B")
    }
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
