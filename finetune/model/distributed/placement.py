"""Divides a model among ranks from its loading on; without a `Placement` each rank holds all of it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn


class Placement(Protocol):
    """The part of a model that this rank holds. One that holds all of it has none."""

    @property
    def offload(self) -> bool:
        """Whether the parts are in host memory, with their gradients and optimizer states."""

    def is_part(self, weight: Tensor) -> bool:
        """Whether only this rank's part of a weight is left, before `apply`."""

    def while_loading(self) -> contextlib.AbstractContextManager[None]:
        """A context in which transformers loads weights one by one, and only this rank's part of each stays."""

    def keep_part(self, model: Any, module: nn.Module) -> None:
        """Keep this rank's part of the weights of a `module` of `model` that was loaded just now."""

    def apply(self, model: Any) -> None:
        """Complete it for a whole model with its adapter. Raises ConfigError for a model that cannot be shared so."""


_gathered: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]] = weakref.WeakKeyDictionary()


def gathers(model: nn.Module, release: Callable[[nn.Module], None]) -> None:
    """Have `release_gathered` call `release` with `model`, whose forward passes gather weights."""
    _gathered[model] = release


def release_gathered(model: nn.Module) -> None:
    """Free the weights that forward passes gathered, before this rank's part is updated."""
    if model in _gathered:
        _gathered[model](model)


def is_divided(weight: Tensor) -> bool:
    """Whether a weight is a distributed tensor of torch, divided among the ranks."""
    return hasattr(weight, "to_local")
