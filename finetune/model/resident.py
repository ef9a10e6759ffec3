"""A base that stays in memory while one adapter after the other is trained on it."""

from __future__ import annotations

import copy
from typing import Any

import torch

from finetune.model.build import Blueprint
from finetune.runtime import libraries


class ResidentBase:
    """Loads a base once for several trainings: each gets modules of its own around the same, frozen weights.

    Only for adapters that leave the base's weights as they are, which PiSSA does not. `computed` has what was computed
    with this base alone, by all that it follows from.
    """

    def __init__(self) -> None:
        self._made_for: tuple[Any, ...] | None = None
        self._base: Any = None
        self.computed: dict[Any, Any] = {}

    def load(self, blueprint: Blueprint, device: torch.device) -> Any:
        """The base of `blueprint` on `device`, with modules that nothing has changed."""
        parts = (blueprint.model, blueprint.quantization, blueprint.attention, blueprint.dtype)
        made_for = (*parts, blueprint.architecture.to_json_string(), device)
        if made_for != self._made_for:
            self._release()  # not two of them at a time
            libraries.exclude_from_collections()  # before the base, whose tensors are counted
            self._base, self._made_for = blueprint.load(device), made_for
        return copy.deepcopy(self._base, {id(weight): weight for weight in self.weights()})

    def _release(self) -> None:
        """Let go of the base in memory, and of what follows from it."""
        self._base = self._made_for = None
        self.computed.clear()

    def weights(self) -> list[torch.Tensor]:
        """The weights and buffers in memory; none before the base is loaded."""
        return [*self._base.parameters(), *self._base.buffers()] if self._base is not None else []
