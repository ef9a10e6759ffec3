"""Activation checkpointing (arXiv 1604.06174): which layers recompute what in the backward pass, and what they keep."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint

from finetune.config import MemorySection
from finetune.config.field_types import LEVELS, every_n
from finetune.errors import ConfigError
from finetune.model.recompute import keeping, offload
from finetune.model.structure import experts
from finetune.storage.records import UpTo

KEPT: dict[str, Collection[str]] = {
    "keep-both": (keeping.ATTENTION, keeping.PRODUCTS),
    "keep-products": (keeping.PRODUCTS,),
    "keep-attention": (keeping.ATTENTION,),
    "all": (),
}
"""For each level of a checkpointed layer what it keeps beside its input."""


def apply(model: Any, section: MemorySection, device_type: str) -> None:
    """Switch checkpointing on for the layers the section names; `model` is the base, wrapped or not.

    On a CPU (`device_type`) the layer inputs are in host memory as they are, and `offload` has nothing to move.
    """
    for module in model.modules():
        if hasattr(module, "recurrent_states"):
            module.register_forward_hook(_forget_state)
    if section.checkpointing in ("none", 0):
        return
    found = layers(model)
    chosen = pattern(section.checkpointing, len(found))
    _check(model, chosen or ["all"])  # a model without such layers does not support it either
    # Named after gradients before transformers 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Checkpointing that re-enters autograd needs an input with a gradient. Here one would only keep the embeddings of
    # all tokens, a leaf of the graph, to the end of the backward pass, and compute their gradient.
    model.disable_input_require_grads()
    copies = offload.Offload() if section.offload == "checkpoints" and device_type != "cpu" else None
    for module in model.modules():  # nested layers, and those of what sees and hears
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    for layer in found:
        layer.biased_experts = experts.have_biases(layer)
        # Around the checkpoint, which older versions (transformers 5.17) begin before hooks and `forward`.
        layer._gradient_checkpointing_func = functools.partial(_checkpoint, layer, copies)  # noqa: SLF001
    choose(model, chosen)


def _checkpoint(layer: Any, copies: offload.Offload | None, function: Callable[..., Any], *inputs: Any) -> Any:
    """The result of `function`, the forward pass of `layer`, which is recomputed but for what its level keeps."""
    kept = KEPT[layer.level]
    # A compiled layer knows no such contexts (torch 2.13), even where they keep nothing.
    contexts = {"context_fn": functools.partial(keeping.contexts, kept, layer.biased_experts)} if kept else {}
    with copies or contextlib.nullcontext():
        return checkpoint(function, *inputs, use_reentrant=False, **contexts)


def _forget_state(module: Any, args: Any, output: Any) -> None:
    """RecurrentGemma keeps the last state for the next token, and with it the graph of all that was recomputed."""
    if module.training:
        module.recurrent_states = None


def choose(model: Any, chosen: Sequence[str]) -> None:
    """Give the layers these levels, where `apply` has turned checkpointing on. Raises ConfigError for an unfit one."""
    _check(model, chosen)
    for layer, level in zip(layers(model), chosen, strict=True):
        layer.level, layer.gradient_checkpointing = level, level != "none"
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

    Every n-th begins with the first. Of numbers of layers the first are those that recompute most, as what the first
    layers keep is held longest; layers beyond all numbers recompute nothing.
    """
    if isinstance(checkpointing, int):
        checkpointing = {"all": checkpointing}
    if isinstance(checkpointing, Mapping):
        named = [level for level in reversed(LEVELS) for _ in range(checkpointing.get(level, 0))]
        return [*named, *["none"] * count][:count]
    if checkpointing == "auto":  # where nothing was forecast
        checkpointing = "all"
    if step := every_n(checkpointing):
        return ["none" if number % step else "all" for number in range(count)]
    return [checkpointing] * count


def ladder(levels: Sequence[str], count: int) -> list[str | dict[str, int]]:
    """What `count` layers can do from the first of `levels` to the last, one layer going to the next at each step."""
    steps: list[str | dict[str, int]] = [levels[0]]
    for before, after in itertools.pairwise(levels):
        steps += [{after: number, before: count - number} for number in range(1, count)]
        steps.append(after)
    return steps


class ByLength:
    """Gives the layers of `model` the levels of what is computed next, where `apply` has turned checkpointing on.

    Up to the lengths of `shorter`, the shortest first, all layers have its level, and beyond them those of
    `checkpointing`. A layer's gradients are the same to the bit at each level, unless an input is so long that its MLP
    takes it in tiles where it is recomputed, and so rounds otherwise (`kernels.mlp`).
    """

    def __init__(self, model: Any, checkpointing: str | int | Mapping[str, int], shorter: Sequence[UpTo]) -> None:
        self._model = model
        self._of_longest = pattern(checkpointing, len(layers(model)))
        self.shorter = tuple(shorter)
        self._now = self._of_longest

    def choose(self, tokens: int) -> None:
        """The levels for a micro-batch of so many tokens a row."""
        found = self.level(tokens)
        levels = self._of_longest if found is None else [found] * len(self._of_longest)
        if levels != self._now:
            choose(self._model, levels)
            self._now = levels

    def level(self, tokens: int) -> str | None:
        """That of a micro-batch which recomputes less than the longest; None for one that does not."""
        return next((each.level for each in self.shorter if tokens <= each.tokens), None)

    def drop(self) -> None:
        """From now on all micro-batches recompute what the longest do."""
        self.shorter = ()


def keeps(layer: Any) -> bool:
    """Whether a layer is recomputed but for some tensors."""
    return layer.gradient_checkpointing and bool(KEPT[layer.level])


def levels(architecture: Any) -> tuple[str, ...]:
    """Those of LEVELS that the layers of `architecture`, transformers' config, can have."""
    # What is written over after it was kept would be read so in the recomputation (OLMo's `clamp_`).
    clips = getattr(architecture.get_text_config(), "clip_qkv", None) is not None
    return tuple(level for level in LEVELS if not (clips and keeping.PRODUCTS in KEPT.get(level, ())))


def layers(model: Any) -> list[Any]:
    """The layers of the text decoder that can be checkpointed, in order; none lies within another."""
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
    """How many layers are checkpointed."""
    return sum(layer.gradient_checkpointing for layer in layers(model))
