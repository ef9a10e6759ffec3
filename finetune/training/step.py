"""One optimizer step: forward and backward passes of its micro-batches, clipping and update. The forecast traces it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from accelerate.utils import send_to_device

from finetune.measure.monitor import Monitor, Peak
from finetune.model.attention import packing
from finetune.model.distributed import sharding
from finetune.model.distributed.zero import Zero
from finetune.model.precision import autocast
from finetune.model.recompute.checkpointing import ByLength
from finetune.objectives import Objective
from finetune.runtime import patches
from finetune.training.collator import Inputs, for_model, tokens_a_row
from finetune.training.noise import Noise

Count: TypeAlias = int | torch.Tensor
"""The divisor of a step's loss: an integer, or with several ranks a tensor on the device, to avoid synchronising."""


@dataclass
class Step:
    """Model, optimizer and settings of a step.

    With several ranks, `shared` is `model` in DistributedDataParallel, and `local` a context in which gradients are not
    synchronized. `catch_up` takes part in what the other ranks wait for in a step whose pass failed here; where it is
    None, such a step cannot be repeated. Each `context` ranks compute the same rows. `zero` is DeepSpeed's engine, if
    that shares the model. With `masked` the model gets the padding mask. `scaler` scales the loss under fp16.
    Embeddings get `noise`, if there is any, by the `number` of steps before this one. With `levels` a micro-batch's
    length decides what is recomputed. `seen` is called after each micro-batch with it, its index and the peak of its
    backward pass.
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
    context: int = 1
    local: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    catch_up: Callable[[], None] | None = None
    zero: Zero | None = None
    scaler: torch.amp.GradScaler | None = None
    noise: Noise | None = None
    levels: ByLength | None = None
    number: int = 0
    seen: Callable[[Inputs, int, Peak], None] = lambda micro_batch, number, peak: None
    under_way: Inputs | None = field(default=None, init=False)
    """The current or last micro-batch."""

    @property
    def repeatable(self) -> bool:
        """Whether a step in which a pass failed can be repeated."""
        return (self.world_size == 1 and self.zero is None) or self.catch_up is not None

    @property
    def cut(self) -> bool:
        """Whether a rank holds but slices of the weights or of the optimizer's states, which all must gather."""
        return self.zero is not None or sharding.is_sharded(self.model)

    def forward_backward(self, micro_batches: list[Inputs], count: Count) -> torch.Tensor:
        """Accumulate gradients over the micro-batches; return the loss, or this rank's part of it times `world_size`.

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
        """Run the forward and backward pass of micro-batch `number` (from 0); return its part of the step's loss."""
        if self.levels:
            self.levels.choose(tokens_a_row(micro_batch))
        self.monitor.enter("forward")
        try:
            batch = send_to_device(for_model(micro_batch, masked=self.masked), self.device, non_blocking=True)
            noise = self.noise.added(micro_batch, self.number) if self.noise else contextlib.nullcontext()
            with autocast(self.precision, self.device), packing.known(batch), noise:
                total, _ = self.objective.loss(self.shared or self.model, batch)
            loss = total / count * self.world_size  # DDP averages the ranks' gradients
            del batch, total
            self.monitor.enter("backward")
            if self.zero:
                self.zero.backward(loss)
            else:
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        finally:
            peak = self.monitor.leave()
        self.seen(micro_batch, number, peak)
        return loss.detach()

    def clip(self) -> torch.Tensor:
        """Clip the gradient norm to `max_grad_norm` (0: no clipping); return the norm before clipping.

        DeepSpeed updates the weights in the same call, and skips the update by itself if the norm is not finite.
        """
        if self.zero:
            return self.zero.step()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        return sharding.clip_grad_norm_(self.trained(), self.max_grad_norm or math.inf)

    def update(self) -> None:
        """Queue the optimizer's update, without waiting for it."""
        with patches.SYNC_GPU.by(lambda tensor: None):
            if self.scaler:
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()

    def rescale(self) -> None:
        """Update the loss scale (fp16): down after non-finite gradients, up again after many finite ones."""
        if self.scaler:
            self.scaler.update()

    def trained(self) -> list[torch.nn.Parameter]:
        """The trained weights."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]
