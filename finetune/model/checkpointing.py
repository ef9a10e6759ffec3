"""Activation checkpointing (arXiv 1604.06174): which layers keep only their input and recompute the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.config import MemorySection
from finetune.config.fields import every_n
from finetune.errors import ConfigError
from finetune.model import experts, offload


def apply(model: Any, section: MemorySection, device_type: str) -> None:
    """Switch checkpointing on for the layers the section names; `model` is the base, wrapped or not.

    On a CPU (`device_type`) the layer inputs are in host memory as they are, and `offload` has nothing to move.
    """
    for module in model.modules():
        if hasattr(module, "recurrent_states"):
            module.register_forward_hook(_forget_state)
    chosen = pattern(section.checkpointing, len(layers(model)))
    if not any(chosen):
        return
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"`memory.checkpointing`: transformers' {type(model).__name__} does not support it; set it to `none`"
        )
    # Named after gradients before transformers 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Checkpointing that re-enters autograd needs an input with a gradient. Here one would only keep the embeddings of
    # all tokens, a leaf of the graph, to the end of the backward pass, and compute their gradient.
    model.disable_input_require_grads()
    choose(model, chosen)
    if section.offload == "checkpoints" and device_type != "cpu":
        offload.attach(layers(model))


def _forget_state(module: Any, args: Any, output: Any) -> None:
    """RecurrentGemma keeps the last state for the next token, and with it the graph of all that was recomputed."""
    if module.training:
        module.recurrent_states = None


def choose(model: Any, chosen: Sequence[bool]) -> None:
    """Checkpoint just these of the layers, where checkpointing is on."""
    for layer, on in zip(layers(model), chosen, strict=True):
        layer.gradient_checkpointing = on
        experts.checkpointed(layer, on)


def pattern(checkpointing: str | int, count: int) -> list[bool]:
    """For each of `count` layers whether it is checkpointed.

    Every n-th begins with the first; a number of layers means the first so many, whose inputs live longest.
    """
    if isinstance(checkpointing, int):
        return [number < checkpointing for number in range(count)]
    assert checkpointing != "auto", "fitted before anything is built"
    step = every_n(checkpointing) or 1
    return [checkpointing != "none" and number % step == 0 for number in range(count)]


def layers(model: Any) -> list[Any]:
    """The decoder layers that can be checkpointed, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpointed(model: Any) -> int:
    """How many layers are checkpointed."""
    return sum(layer.gradient_checkpointing for layer in layers(model))
