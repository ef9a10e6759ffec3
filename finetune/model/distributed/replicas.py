"""A copy of the model on each rank, in DistributedDataParallel (DDP), which can catch up after a failed pass.

In the last backward pass of a step, DDP averages the gradients of all ranks, bucket by bucket and in the same order on
each. A rank whose pass failed must take part in the buckets that are left, or the other ranks wait for it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from finetune.model.distributed.engine import OneProcess
from finetune.runtime import ranks

# Deprecated in torch 2.13, whose new name torch 2.11 does not know.
_SYNCHRONIZES_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class Replicas(OneProcess):
    """The engine of a rank that holds a copy of the model.

    `repeatable`: the ranks exchange nothing but gradients, so that one of them can catch up.
    """

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, *, repeatable: bool
    ) -> None:
        super().__init__(model, optimizer, scaler, ranks.world_size())
        self.repeatable = repeatable
        self._ddp: DistributedDataParallel | None = DistributedDataParallel(model, **{_SYNCHRONIZES_BUFFERS: False})
        self._averaged: set[torch.Tensor] = set()
        self._hooks = [weight.register_post_accumulate_grad_hook(self._count) for weight in self._trained()]

    @property
    def forward(self) -> Any:
        return self._ddp

    def _count(self, weight: torch.Tensor) -> None:
        """Note that DDP has the gradient of `weight` in this step."""
        if self._ddp and self._ddp.require_backward_grad_sync:
            self._averaged.add(weight)
            ranks.advance()

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """A context in which gradients are not averaged; those of the next pass are."""
        assert self._ddp
        try:
            with self._ddp.no_sync():
                yield
        finally:
            self._averaged.clear()
            ranks.advance()

    def catch_up(self, idle_pass: Callable[[], object]) -> None:
        """Average the gradients that a failed pass left out.

        DDP notices gradients as they come, wherever from: before the first one `idle_pass` gives all of them; later,
        zeros take the place of those that did not come.
        """
        if not self._averaged:
            idle_pass()
        elif missing := [weight for weight in self._trained() if weight not in self._averaged]:
            torch.stack([(weight * 0).sum(dtype=torch.float32) for weight in missing]).sum().backward()

    def close(self) -> None:
        """Give up DDP, which refers to the process group and must not be the last to do so: its destructor would join
        the group's threads while holding the GIL, for which they may be waiting (torch 2.13, ProcessGroupGloo).

        The weights, which are published next, no longer refer to this engine and its optimizer's states.
        """
        for hook in self._hooks:
            hook.remove()
        self._ddp = None
