"""Keeps a base in memory while one adapter after the other is trained on it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from finetune.model.build import Blueprint
from finetune.model.distributed.placement import Placement
from finetune.runtime import libraries


class ResidentBase:
    """Loads a base once for several trainings: each gets modules of its own around the same, frozen weights.

    Only for adapters that leave the base's weights as they are, which PiSSA does not.
    """

    def __init__(self) -> None:
        self._made_for: tuple[Any, ...] | None = None
        self._base: Any = None

    def load(self, blueprint: Blueprint, device: torch.device, placement: Placement | None = None) -> Any:
        """The base of `blueprint` on `device`, with modules that nothing has changed, in place of `Blueprint.load`."""
        assert placement is None, "a sweep runs in one process"
        parts = (blueprint.model, blueprint.quantization, blueprint.attention, blueprint.dtype)
        made_for = (*parts, blueprint.architecture.to_json_string(), device)
        if made_for != self._made_for:
            self._base = self._made_for = None  # not two of them at a time
            libraries.exclude_from_collections()  # before the base, whose tensors are counted
            self._base, self._made_for = blueprint.load(device), made_for
        weights = itertools.chain(self._base.parameters(), self._base.buffers())
        return copy.deepcopy(self._base, {id(weight): weight for weight in weights})
