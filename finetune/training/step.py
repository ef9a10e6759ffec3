"""One optimizer step: forward and backward passes of its micro-batches, clipping and update. The forecast traces it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from accelerate.utils import send_to_device

from finetune.model.attention import packing
from finetune.model.distributed.engine import Engine
from finetune.model.distributed.placement import release_gathered
from finetune.model.precision import autocast
from finetune.model.recompute.checkpointing import ByLength
from finetune.objectives import Objective, sums
from finetune.runtime.memory_monitor import Monitor, Peak
from finetune.training.collator import Inputs, apart, for_model, tokens_a_row
from finetune.training.noise import Noise

LossCount: TypeAlias = int | torch.Tensor
"""The divisor of a step's loss: an integer, or with several ranks a tensor on the device, to avoid synchronising."""


@dataclass(frozen=True)
class Step:
    """An optimizer step of a model, in the `engine` that shares it among ranks.

    Each `context` ranks compute the same rows. With `masked` the model gets the padding mask. Embeddings get `noise`,
    if there is any. With `levels` a micro-batch's length decides what is recomputed. `idle` is a micro-batch without
    trained tokens, with which a rank catches up. `seen` is called after each micro-batch with it, its index and the
    peak of its backward pass.
    """

    engine: Engine
    objective: Objective
    precision: str
    max_grad_norm: float
    masked: bool
    device: torch.device
    monitor: Monitor
    context: int = 1
    noise: Noise | None = None
    levels: ByLength | None = None
    idle: Inputs | None = None
    seen: Callable[[Inputs, int, Peak], None] = lambda micro_batch, index, peak: None
    _sums: list[torch.Tensor] = field(default_factory=list)
    _means: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self.engine.model

    @torch.no_grad()
    def sum_before(
        self, micro_batches: list[Inputs], begin: Callable[[Inputs], object] = lambda micro_batch: None
    ) -> torch.Tensor:
        """The sum and count (2,), float64, of the objective's `step_mean` over this rank's micro-batches.

        `begin` is called with each micro-batch before its pass.
        """
        mean = self.objective.step_mean
        assert mean is not None
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for micro_batch in micro_batches:
            begin(micro_batch)
            with self.monitor.phase("forward"):
                inputs = for_model(apart(micro_batch), masked=self.masked)
                batch = send_to_device(inputs, self.device, non_blocking=True)
                with autocast(self.precision, self.device), packing.known(batch):
                    total += torch.stack(sums(mean, self.model, batch))
        release_gathered(self.model)
        return total

    def take_mean(self, sums: torch.Tensor) -> None:
        """Give the passes of the step the mean of `sum_before`, made of the `sums` of all ranks."""
        self._means["step_mean"] = sums[0] / sums[1].clamp(min=1)

    def forward_backward(
        self,
        micro_batches: list[Inputs],
        count: LossCount,
        number: int = 0,
        begin: Callable[[Inputs], object] = lambda micro_batch: None,
    ) -> torch.Tensor:
        """Accumulate gradients over the micro-batches; return the loss, or this rank's part of it times the ranks.

        `count` is the objective's count over all micro-batches of all ranks, by which each sum is divided. `number`
        steps were taken before this one. `begin` is called with each micro-batch before its pass.
        """
        self.model.train()
        self._sums.clear()
        losses: list[torch.Tensor] = []
        *before, last = micro_batches
        with self.engine.local():
            for micro_batch in before:
                begin(micro_batch)
                losses.append(self.micro_step(micro_batch, len(losses), count, number))
        begin(last)
        losses.append(self.micro_step(last, len(losses), count, number))
        return torch.stack(losses).sum()

    def micro_step(self, micro_batch: Inputs, index: int, count: LossCount, number: int = 0) -> torch.Tensor:
        """Run the forward and backward pass of micro-batch `index` (from 0); return its part of the step's loss."""
        if self.levels:
            self.levels.choose(tokens_a_row(micro_batch))
        self.monitor.enter("forward")
        try:
            batch = send_to_device(for_model(micro_batch, masked=self.masked), self.device, non_blocking=True)
            noise = self.noise.added(micro_batch, number) if self.noise else contextlib.nullcontext()
            batch |= self._means
            with autocast(self.precision, self.device), packing.known(batch), noise:
                total, _, *statistics = self.objective.loss(self.engine.forward, batch)
            if statistics:
                self._sums.append(torch.stack([*itertools.chain.from_iterable(statistics[0].values())]).detach())
            loss = total / count * self.engine.world_size  # gradients are averaged over ranks
            del batch, total
            self.monitor.enter("backward")
            self.engine.backward(loss)
        finally:
            peak = self.monitor.leave()
        self.seen(micro_batch, index, peak)
        return loss.detach()

    @property
    def sums(self) -> torch.Tensor:
        """The sum and count of each of the objective's statistics over the micro-batches of the last step, in order."""
        return torch.stack(self._sums).sum(0) if self._sums else torch.empty(0, device=self.device)

    def catch_up(self) -> None:
        """Take part in what the other ranks wait for, after a pass that failed here."""
        self.engine.catch_up(lambda: self.micro_step(self.idle, 0, 1) if self.idle else None)

    def clip(self) -> torch.Tensor:
        """Clip the gradient norm to `max_grad_norm` (0: no clipping); return the norm before clipping."""
        return self.engine.clip(self.max_grad_norm)

    def update(self) -> None:
        """Queue the optimizer's update, without waiting for it."""
        self.engine.update()

    def rescale(self) -> None:
        """Update the loss scale (fp16): down after non-finite gradients, up again after many finite ones."""
        if self.engine.scaler:
            self.engine.scaler.update()

    def trained(self) -> list[torch.nn.Parameter]:
        """The trained weights."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]
