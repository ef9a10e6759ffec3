"""Remove some of a model's layers; those that are kept are built exactly as in the whole model."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

from finetune.config import AdapterSection
from finetune.config.fields import is_pattern
from finetune.model import adapter
from finetune.model.checkpointing import layers


class Scattered(Exception):
    """A model does not keep its layers in one list."""


def kinds(model: nn.Module) -> list[Hashable]:
    """For each decoder layer what it is made of; layers of one kind take the same memory and time."""
    config: Any = model.config
    per_layer = _per_layer(config.get_text_config(), len(layers(model)))
    return [
        (_make_up(layer), *(repr(values[number]) for values in per_layer.values()))
        for number, layer in enumerate(layers(model))
    ]


def adapted(model: nn.Module, section: AdapterSection) -> tuple[set[nn.Module], list[Hashable]]:
    """The modules that regular expressions among the targets match, and for each decoder layer their names in it.

    Layers of one kind may differ in the latter.
    """
    named = {model.get_submodule(name) for name in adapter.matching(model, section)}
    return named, [tuple(name for name, part in layer.named_modules() if part in named) for layer in layers(model)]


def keep(model: nn.Module, kept: Sequence[int]) -> None:
    """Leave only the decoder layers with these indices in `model`, and in its config.

    Raises Scattered for a model that keeps its layers elsewhere than in one list.
    """
    found = layers(model)
    holder, name = _holder(model, found)
    config: Any = model.config
    text = config.get_text_config()
    for key, values in _per_layer(text, len(found)).items():
        setattr(text, key, [values[number] for number in kept])
    text.num_hidden_layers = len(kept)
    setattr(holder, name, nn.ModuleList([found[number] for number in kept]))


def renamed(section: AdapterSection, model: nn.Module, named: set[nn.Module]) -> AdapterSection:
    """The targets with the full names that the modules in `named` have now, after `keep`."""
    if not named:
        return section
    names = [re.escape(name) for name, module in model.named_modules() if module in named]
    plain = [target for target in section.targets if not is_pattern(target)]
    return section.model_copy(update={"targets": [*plain, *names]})


def _make_up(layer: nn.Module) -> Hashable:
    return tuple(
        (name, type(module).__name__, tuple(tuple(weight.shape) for weight in module.parameters(recurse=False)))
        for name, module in layer.named_modules()
    )


def _per_layer(config: Any, count: int) -> dict[str, Any]:
    """The entries of a config that are lists with a value for each layer, such as `layer_types`."""
    return {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and not isinstance(value, str)
    }


def _holder(model: nn.Module, found: list[Any]) -> tuple[nn.Module, str]:
    """The module that holds the list of layers, and the name it has there."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and list(child) == found:
                return module, name
    raise Scattered(f"{type(model).__name__} does not keep its layers in one list")
