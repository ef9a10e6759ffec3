"""Activation checkpointing (arXiv 1604.06174): which layers recompute what in the backward pass, and what they keep."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from finetune.config import MemorySection
from finetune.config.field_types import LEVELS, every_n
from finetune.errors import ConfigError
from finetune.model.recompute import keeping, offload
from finetune.model.structure import experts
from finetune.runtime import patches
from finetune.storage.records import UpTo

KEPT: dict[str, Collection[str]] = {
    "keep-both": (keeping.ATTENTION, keeping.PRODUCTS),
    "keep-products": (keeping.PRODUCTS,),
    "keep-attention": (keeping.ATTENTION,),
    "all": (),
}
"""What a checkpointed layer of each level keeps beside its input."""


def apply(model: Any, section: MemorySection, device_type: str, copies_to_host: offload.Copies | None = None) -> None:
    """Switch checkpointing on for the layers the section names; `model` is the base. On a CPU nothing is offloaded.

    `copies_to_host` are those of a trace (`offload.Offload`).
    """

    def forget_state(module: Any, *_: Any) -> None:
        """RecurrentGemma keeps the last state for the next token, and with it the graph of all that was recomputed."""
        if module.training:
            module.recurrent_states = None

    for module in model.modules():
        if hasattr(module, "recurrent_states"):
            module.register_forward_hook(forget_state)
    if section.checkpointing in ("none", 0):
        return
    decoder = layers(model)
    chosen = pattern(section.checkpointing, len(decoder))
    _check(model, chosen or ["all"])  # also raises for a model without such layers
    model.activation_checkpointing_enable({"use_reentrant": False})
    # Only reentrant checkpointing needs an input with a gradient. Here it would keep the embeddings of all tokens, then
    # a leaf of the graph, to the end of the backward pass, and compute their gradient.
    model.disable_input_require_grads()
    offloads = section.offload == "checkpoints" and device_type != "cpu"
    copies = offload.Offload(copies_to_host) if offloads else None
    for module in model.modules():  # nested layers, and those of vision and audio towers
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    for layer in decoder:
        patches.CHECKPOINT_FUNCTION.put(_Checkpointed(experts.have_biases(layer), copies), layer)
    choose(model, chosen)


@dataclass
class _Checkpointed:
    """Runs the forward pass of a layer, of which the backward pass recomputes all that its `level` does not keep."""

    biased_experts: bool
    copies: offload.Offload | None
    level: str = "all"

    @classmethod
    def of(cls, layer: Any) -> _Checkpointed:
        """The one of a layer, after `apply`."""
        own: _Checkpointed = getattr(layer, patches.CHECKPOINT_FUNCTION.attribute)
        return own

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        kept = KEPT[self.level]
        # torch 2.13 cannot compile such contexts, even if they keep nothing, nor context variables.
        contexts = {"context_fn": functools.partial(keeping.contexts, kept, self.biased_experts)} if kept else {}
        function = function if torch.compiler.is_compiling() else keeping.recomputed(function)
        with self.copies or contextlib.nullcontext():
            return checkpoint(function, *inputs, use_reentrant=False, **contexts)


def choose(model: Any, chosen: Sequence[str]) -> None:
    """Set the level of each layer, after `apply`. Raises ConfigError for a level that the model does not support."""
    _check(model, chosen)
    for layer, level in zip(layers(model), chosen, strict=True):
        layer.gradient_checkpointing = level != "none"
        if layer.gradient_checkpointing:
            _Checkpointed.of(layer).level = level
        experts.checkpointed(layer, level != "none")


def _check(model: Any, chosen: Iterable[str]) -> None:
    used = set(chosen) - {"none"}
    if used and not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"`memory.checkpointing`: transformers' {type(model).__name__} does not support it; set it to `none`"
        )
    for level in used.difference(levels(model.config)):
        raise ConfigError(
            f"`memory.checkpointing`: `{level}` keeps products, and {type(model).__name__} clips those of attention in "
            "place; set `keep-attention` or `all`"
        )


def pattern(checkpointing: str | int | Mapping[str, int], count: int) -> list[str]:
    """The level of each of `count` layers, one of LEVELS.

    `every-n` begins with the first layer. Given a number of layers per level, the first layers recompute most, because
    what they keep is held longest; layers beyond the sum of the numbers recompute nothing.
    """
    if isinstance(checkpointing, int):
        checkpointing = {"all": checkpointing}
    if isinstance(checkpointing, Mapping):
        named = [level for level in reversed(LEVELS) for _ in range(checkpointing.get(level, 0))]
        return [*named, *["none"] * count][:count]
    if checkpointing == "auto":  # without a forecast
        checkpointing = "all"
    if step := every_n(checkpointing):
        return ["none" if number % step else "all" for number in range(count)]
    return [checkpointing] * count


def ladder(levels: Sequence[str], count: int) -> list[str | dict[str, int]]:
    """Settings for `count` layers from the first of `levels` to the last; each step moves one layer on."""
    steps: list[str | dict[str, int]] = [levels[0]]
    for before, after in itertools.pairwise(levels):
        steps += [{after: number, before: count - number} for number in range(1, count)]
        steps.append(after)
    return steps


class ByLength:
    """Sets the levels of a model's layers for each micro-batch by the length of its rows, after `apply`.

    The first entry of `shorter`, the shortest first, that the rows fit gives the level of all layers; longer rows have
    the levels of `checkpointing`. A layer's gradients are the same to the bit at each level, unless the input is so
    long that a recomputed MLP takes it in tiles and rounds differently (`kernels.mlp`).
    """

    def __init__(self, model: Any, checkpointing: str | int | Mapping[str, int], shorter: Sequence[UpTo]) -> None:
        self._model = model
        self._of_longest = pattern(checkpointing, len(layers(model)))
        self.shorter = tuple(shorter)
        self._now = self._of_longest

    def choose(self, tokens: int) -> None:
        """Set the levels for a micro-batch whose rows have `tokens` tokens."""
        level = self.level(tokens)
        levels = self._of_longest if level is None else [level] * len(self._of_longest)
        if levels != self._now:
            choose(self._model, levels)
            self._now = levels

    def level(self, tokens: int) -> str | None:
        """The level of all layers for rows of `tokens` tokens; None for the levels of the longest rows."""
        return next((each.level for each in self.shorter if tokens <= each.tokens), None)

    def drop(self) -> None:
        """Give all micro-batches the levels of the longest rows from now on."""
        self.shorter = ()


def level_of(layer: Any) -> str:
    """The level of a layer now, one of LEVELS."""
    return _Checkpointed.of(layer).level if layer.gradient_checkpointing else "none"


def keeps(layer: Any) -> bool:
    """Whether a layer is recomputed except for tensors that it keeps."""
    return bool(KEPT.get(level_of(layer)))


def levels(architecture: Any) -> tuple[str, ...]:
    """The LEVELS that the layers of `architecture`, transformers' config, support."""
    # A kept tensor that is then overwritten (OLMo's `clamp_`) would be read overwritten in the recomputation.
    clips = getattr(architecture.get_text_config(), "clip_qkv", None) is not None
    return tuple(level for level in LEVELS if not (clips and keeping.PRODUCTS in KEPT.get(level, ())))


def layers(model: Any) -> list[Any]:
    """The layers of the text decoder that can be checkpointed, in order; never one inside another."""
    config = getattr(model, "config", None)
    return list(_layers(model, config and config.get_text_config().model_type))


def _layers(module: Any, model_type: str | None) -> Iterator[Any]:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        elif not isinstance(child, PreTrainedModel) or child.config.get_text_config().model_type == model_type:
            yield from _layers(child, model_type)


def checkpointed(model: Any) -> int:
    """The number of checkpointed layers."""
    return sum(layer.gradient_checkpointing for layer in layers(model))
