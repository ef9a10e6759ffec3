"""Remove some of a model's layers; those that are kept are built exactly as in the whole model."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

from finetune.config import AdapterSection
from finetune.config.field_types import is_pattern
from finetune.model.adapters import adapter
from finetune.model.recompute.checkpointing import layers
from finetune.model.structure import composite, linear_layers, recipes


class Scattered(Exception):
    """A model does not keep its layers in one list."""


def kinds(model: nn.Module) -> list[Hashable]:
    """The kind of each decoder layer; layers of one kind and of the same `forms` take the same memory and time."""
    config: Any = model.config
    per_layer = _per_layer(config.get_text_config(), len(layers(model)))
    untrained = {model.get_submodule(name) for name in linear_layers.untrained(model)}
    # To the outputs of the first layers a model of images may add features (DeepStack).
    enriched = 0
    if composite.beside_language(model):
        enriched = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())

    def make_up(part: nn.Module) -> Hashable:
        shapes = tuple(tuple(weight.shape) for weight in part.parameters(recurse=False))
        return type(part).__name__, shapes, part in untrained

    return [
        (
            tuple((name, make_up(part)) for name, part in layer.named_modules()),
            *(repr(values[number]) for values in per_layer.values()),
            number < enriched,
        )
        for number, layer in enumerate(layers(model))
    ]


def forms(model: nn.Module) -> list[Hashable]:
    """The forms of each decoder layer's weights, where a model's are mixed: layers of one kind do the same in all."""
    return [tuple(tuple(recipes.remembered(part).items()) for part in layer.modules()) for layer in layers(model)]


Named = dict[nn.Module, tuple[bool, int]]
"""Modules that are adapted by their full names, each with whether a pattern in the targets matches it, and its rank."""


def adapted(model: nn.Module, section: AdapterSection) -> tuple[Named, list[Hashable]]:
    """The modules that `adapter.targets` or `adapter.ranks` choose by full name, and for each layer those inside it.

    Layers of one kind may differ in what is inside them.
    """
    matched, ranks = adapter.matching(model, section), adapter.ranks(model, section) if section.ranks else {}
    chosen = {*matched, *(name for name, rank in ranks.items() if rank != section.rank)}
    named = {model.get_submodule(name): (name in matched, ranks.get(name, section.rank)) for name in chosen}
    inside = ([(name, named[part]) for name, part in layer.named_modules() if part in named] for layer in layers(model))
    return named, [tuple(names) for names in inside]


def keep(model: nn.Module, kept: Sequence[int]) -> None:
    """Leave only these decoder layers in `model` and its config. Raises Scattered unless one list has them."""
    whole = layers(model)
    holder, list_name = next(
        (
            (module, name)
            for module in model.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and list(child) == whole
        ),
        (None, ""),
    )
    if holder is None:
        raise Scattered(f"{type(model).__name__} does not keep its layers in one list")
    config: Any = model.config
    text = config.get_text_config()
    for key, values in _per_layer(text, len(whole)).items():
        setattr(text, key, [values[number] for number in kept])
    text.num_hidden_layers = len(kept)
    setattr(holder, list_name, nn.ModuleList([whole[number] for number in kept]))


def renamed(section: AdapterSection, model: nn.Module, named: Named) -> AdapterSection:
    """The targets and ranks with the full names that the modules in `named` have now, after `keep`."""
    if not named:
        return section
    now = {re.escape(name): named[module] for name, module in model.named_modules() if module in named}
    ranks = {name: rank for name, (_, rank) in now.items() if rank != section.rank}
    targets = section.targets
    if targets != "all-linear":
        plain = [target for target in targets if not is_pattern(target)]
        targets = [*plain, *(name for name, (matched, _) in now.items() if matched)]
    return section.model_copy(update={"targets": targets, "ranks": ranks})


def _per_layer(config: Any, count: int) -> dict[str, Any]:
    """The entries of a config that are lists with a value for each layer, such as `layer_types`."""
    return {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and not isinstance(value, str)
    }
