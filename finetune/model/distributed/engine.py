"""The engine of a step: its passes, its clipping and its update, for one way in which ranks share a model.

`OneProcess` shares nothing. `replicas` and `sharding` have an engine each, and an extra may; a run chooses one by
`training.strategies`; a forecast passes engines of its own. Rows that ranks split (`context`) come beside any of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finetune.model.distributed import gradient_norm, optimizer_states
from finetune.model.distributed.optimizer_states import States
from finetune.runtime import patches


class WeightAccess(Protocol):
    """The weights of `model`; a rank may hold parts of them."""

    model: Any

    def shape_of(self, weight: Tensor) -> torch.Size:
        """The shape of the whole of a weight."""

    def whole(self, weight: Tensor) -> Tensor:
        """The whole of a weight. All ranks must call it."""

    def write(self, whole: Tensor, into: Tensor) -> None:
        """Copy a whole weight to what this rank holds of it. All ranks must call it."""


class Engine(WeightAccess, Protocol):
    """Runs passes and updates of `model`. Made whole, before the first step of a run.

    `optimizer` has the groups whose learning rates a schedule sets. `scaler` scales the loss under fp16. Gradients are
    averaged over `world_size` ranks.
    """

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    world_size: int
    repeatable: bool
    """Whether a step in which a pass failed can be repeated. If not, the other ranks may wait within that pass."""
    holds_parts: bool
    """Whether a rank holds parts of the weights or of the optimizer's states, so that reading them takes all ranks."""

    @property
    def forward(self) -> Any:
        """The model as an objective calls it, plain or wrapped by the engine's library: no pass is taken here."""

    @property
    def weights(self) -> list[nn.Parameter]:
        """The trained weights, as `optimizer_state` numbers them."""

    def local(self) -> contextlib.AbstractContextManager[None]:
        """A context for all passes of a step but the last: gradients may stay with their rank."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, ()."""

    def catch_up(self, idle_pass: Callable[[], object]) -> None:
        """Take part in what the other ranks wait for in a step whose pass failed here; gradients are then meaningless.

        `idle_pass` runs a pass without trained tokens.
        """

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradient norm to `max_norm` (0: no clipping); return the norm before, the same on each rank.

        An engine that cannot separate the two also updates the weights, unless the norm or a loss is not finite.
        """

    def update(self) -> None:
        """Queue the update of the weights, without waiting for it; called only if the norm was finite."""

    def warm_up_count(self, count: int) -> int:
        """The divisor of the loss of a warm-up step, for which `empty_update` leaves the weights alone."""

    def make_states(self, max_norm: float) -> None:
        """Create the optimizer's states before the first step."""

    def empty_update(self, max_norm: float) -> None:
        """Clip and update with the memory of any update but without a change of weights, rates and loss scale."""

    def optimizer_state(self) -> States:
        """The whole states of the optimizer, as `optimizer_states.read`, copied to host memory of rank 0.

        All ranks must call it if `holds_parts`.
        """

    def restore_optimizer(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the whole states of each of `weights`, after the weights. Raises ValueError if they do not fit."""

    def close(self) -> None:
        """End the engine, before the process group is destroyed."""


class WholeWeights:
    """The weights of a model that this process holds as a whole."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def shape_of(self, weight: Tensor) -> torch.Size:
        return weight.shape

    def whole(self, weight: Tensor) -> Tensor:
        return weight

    def write(self, whole: Tensor, into: Tensor) -> None:
        into.copy_(whole)


class OneProcess(WholeWeights):
    """The engine of a process that holds all of the model and shares nothing."""

    repeatable = True
    holds_parts = False
    device_type: str | None = None
    """The device that a trace stands for; None: that of the weights."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None,
        world_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(model)
        self.optimizer = optimizer
        self.scaler = scaler
        self.world_size = world_size

    @property
    def forward(self) -> Any:
        return self.model

    @property
    def weights(self) -> list[nn.Parameter]:
        return optimizer_states.parameters(self.optimizer)

    def local(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def catch_up(self, idle_pass: Callable[[], object]) -> None:
        """Do nothing: no other rank waits."""

    def clip(self, max_norm: float) -> Tensor:
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        return self._clip(max_norm or math.inf)

    def _clip(self, max_norm: float) -> Tensor:
        return gradient_norm.clip(self._trained(), max_norm, self.device_type)

    def update(self) -> None:
        with patches.SYNC_GPU.by(lambda tensor: None):
            if self.scaler:
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()

    def warm_up_count(self, count: int) -> int:
        return max(1, count)

    def make_states(self, max_norm: float) -> None:
        for weight in self._trained():
            weight.grad = torch.zeros_like(weight)
        self.empty_update(max_norm)

    def empty_update(self, max_norm: float) -> None:
        """With gradients and learning rates of zero."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for weight in self._trained():
            if weight.grad is not None:
                weight.grad.zero_()
        self._clip(max_norm or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def optimizer_state(self) -> States:
        described, tensors = optimizer_states.read(self.optimizer)
        return described, {name: on_host(tensor) for name, tensor in tensors.items()}

    def restore_optimizer(self, states: Sequence[Mapping[str, Any]]) -> None:
        optimizer_states.restore(self.optimizer, states)

    def close(self) -> None:
        """Do nothing: there are no other ranks."""

    def _trained(self) -> list[nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
