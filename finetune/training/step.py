"""One optimizer step: forward and backward passes of its micro-batches, clipping, update. The forecast traces this."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import bitsandbytes
import torch
from accelerate.utils import send_to_device

from finetune.measure.monitor import Monitor, Peak
from finetune.model import packing
from finetune.model.base import autocast
from finetune.objectives import Objective
from finetune.runtime.libraries import replaced
from finetune.training.collator import Inputs, for_model

Count: TypeAlias = int | torch.Tensor
"""What a step's loss is divided by: an integer, or of several ranks a tensor on the device, so that none waits."""


@dataclass
class Step:
    """What a step is computed with.

    With several ranks `shared` is `model` in DistributedDataParallel, and `local` a context in which gradients are not
    synchronized. With `masked` the model is given the padding mask. `scaler` scales the loss under fp16. `seen` is
    called after each micro-batch with it, its number and the peak of its backward pass.
    """

    model: Any
    objective: Objective
    optimizer: torch.optim.Optimizer
    precision: str
    max_grad_norm: float
    masked: bool
    device: torch.device
    monitor: Monitor
    shared: Any = None
    world_size: int = 1
    local: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    scaler: torch.amp.GradScaler | None = None
    seen: Callable[[Inputs, int, Peak], None] = lambda micro_batch, number, peak: None
    under_way: Inputs | None = field(default=None, init=False)
    """The micro-batch that is computed, or was last."""

    def forward_backward(self, micro_batches: list[Inputs], count: Count) -> torch.Tensor:
        """Accumulate the gradients of the step; its loss, or this rank's part of it times `world_size`.

        `count` is the objective's count over all micro-batches of all ranks, by which each sum is divided.
        """
        self.model.train()
        losses: list[torch.Tensor] = []
        *before, last = micro_batches
        with self.local():
            for micro_batch in before:
                self.under_way = micro_batch
                losses.append(self.micro_step(micro_batch, len(losses), count))
        self.under_way = last
        losses.append(self.micro_step(last, len(losses), count))
        return torch.stack(losses).sum()

    def micro_step(self, micro_batch: Inputs, number: int, count: Count) -> torch.Tensor:
        """Run forward and backward pass of micro-batch `number`, from 0; return its part of the step's loss."""
        self.monitor.enter("forward")
        try:
            batch = send_to_device(for_model(micro_batch, masked=self.masked), self.device, non_blocking=True)
            with autocast(self.precision, self.device), packing.known(batch):
                total, _ = self.objective.loss(self.shared or self.model, batch)
            loss = total / count * self.world_size  # the ranks' gradients are averaged
            del batch, total
            self.monitor.enter("backward")
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        finally:
            peak = self.monitor.leave()
        self.seen(micro_batch, number, peak)
        return loss.detach()

    def clip(self) -> torch.Tensor:
        """Scale the gradients to a norm of at most `max_grad_norm` (0: no bound); return the norm before."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or math.inf)

    def update(self) -> None:
        """Queue the optimizer's update."""
        # bitsandbytes (0.50) waits for the device after each weight. The stream keeps the order by itself; who reads
        # paged states from the host has to wait (`state.snapshot`).
        with replaced(bitsandbytes.optim.optimizer, "sync_gpu", lambda tensor: None):
            if self.scaler:
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()

    def rescale(self) -> None:
        """Move the loss scale (fp16): down after gradients that were not finite, up again after many that were."""
        if self.scaler:
            self.scaler.update()

    def trained(self) -> list[torch.nn.Parameter]:
        """The weights that are trained."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]
