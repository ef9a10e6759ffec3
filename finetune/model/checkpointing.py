"""Activation checkpointing (arXiv 1604.06174): which layers keep only their input and recompute the rest."""

from __future__ import annotations

from typing import Any

from finetune.config import MemorySection
from finetune.config.fields import every_n


def apply(model: Any, section: MemorySection) -> None:
    """Switch checkpointing on for the layers the section names; `model` is the base, wrapped or not.

    On a CPU the layer inputs are in host memory as they are, and `offload` has nothing to move.
    """
    checkpointing = section.checkpointing
    if checkpointing in ("none", 0):
        return
    # bitsandbytes' 8-bit product keeps its input on the autograd node itself (0.50, `MatMul8bitFp` and `MatMul8bitLt`),
    # where only the older form of checkpointing, which builds no graph in the first pass, lets go of it.
    eight_bit = bool(getattr(model, "is_loaded_in_8bit", False))
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": eight_bit},
        every_n_layers=every_n(checkpointing) or 1,
        offload=section.offload == "checkpoints" and model.device.type != "cpu",
    )
    if isinstance(checkpointing, int):
        # transformers counts every n-th layer; a number of layers means the first so many, whose inputs live longest.
        for layer in layers(model)[checkpointing:]:
            layer.gradient_checkpointing = False


def layers(model: Any) -> list[Any]:
    """The decoder layers that can be checkpointed, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpointed(model: Any) -> int:
    """How many layers are checkpointed."""
    return sum(layer.gradient_checkpointing for layer in layers(model))
