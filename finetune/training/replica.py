"""A rank's copy of the model in DistributedDataParallel (DDP), which can catch up with the others after a failed pass.

In the last backward pass of a step, DDP averages the gradients of all ranks, bucket by bucket and in the same order on
each. A rank whose pass failed must take part in the buckets that are left, or the other ranks wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from finetune.runtime import patches, ranks
from finetune.training.collator import Inputs
from finetune.training.step import Step


class Replica:
    """`model` in DDP (`shared`), and the trained weights whose gradients DDP has in the current step."""

    def __init__(self, model: Any) -> None:
        self.shared = DistributedDataParallel(model)
        patches.BROADCAST_BUFFERS.put(False, self.shared)
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._averaged: set[torch.Tensor] = set()
        for weight in self._trained:
            weight.register_post_accumulate_grad_hook(self._came)

    def _came(self, weight: torch.Tensor) -> None:
        if self.shared.require_backward_grad_sync:
            self._averaged.add(weight)
            ranks.advance()

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """A context in which gradients are not averaged; those of the next pass are."""
        try:
            with self.shared.no_sync():
                yield
        finally:
            self._averaged.clear()
            ranks.advance()

    def catch_up(self, step: Step, idle: Inputs) -> None:
        """Average the gradients that a failed pass left out with the other ranks; all are meaningless then.

        DDP notices gradients as they come, wherever from: before the first one a pass over `idle`, a tiny micro-batch,
        gives all of them; later, zeros take the place of those that did not come.
        """
        if not self._averaged:
            step.micro_step(idle, 0, 1)
        elif missing := [weight for weight in self._trained if weight not in self._averaged]:
            torch.stack([(weight * 0).sum(dtype=torch.float32) for weight in missing]).sum().backward()
