"""Divides a model among ranks from its loading on; without a `Placement` each rank holds all of it."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


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


def release_gathered(model: nn.Module) -> None:
    """Free the weights that forward passes gathered, which leaves this rank its shards alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_divided(weight: Tensor) -> bool:
    """Whether a weight is a distributed tensor of torch, divided among the ranks."""
    return hasattr(weight, "to_local")
