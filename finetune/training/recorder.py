"""Records each step: metrics.jsonl, the progress display, trackers and the profiler."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch

from finetune.errors import NumbersError
from finetune.objectives import Objective, Statistics
from finetune.runtime import ranks
from finetune.runtime.memory_monitor import LeakWatch, Monitor, Peak
from finetune.storage.files import append_line
from finetune.storage.rundir import RunDirectory
from finetune.training.callbacks import Callbacks
from finetune.training.collator import Idle, Inputs
from finetune.training.guards import Falls, Skips, Spikes, remedy
from finetune.training.progress import Progress
from finetune.training.step import LossCount
from finetune.training.tracking import Trackers


class Listener(Protocol):
    """The interface of a progress display; it gets the lines of metrics.jsonl."""

    def started(self, first_step: int, last_step: int) -> None: ...

    def stepped(self, line: dict[str, Any]) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Outlets:
    """Where the events and numbers of a run go: its directory, a display of its progress, trackers and callbacks."""

    run: RunDirectory
    listener: Listener
    trackers: Trackers
    callbacks: Callbacks = field(default_factory=Callbacks)


@dataclass(frozen=True)
class StepCounts:
    """Counts of a step before it runs: the divisor of its loss, tokens, and positions (with padding)."""

    trained: LossCount
    tokens: LossCount
    positions: LossCount

    @classmethod
    def of(cls, micro_batches: Iterable[Inputs], objective: Objective) -> StepCounts:
        """The counts of this rank's micro-batches, taken on the host."""
        trained = tokens = positions = 0
        for inputs in micro_batches:
            if isinstance(inputs, Idle):
                continue
            here = inputs["input_ids"].numel()
            trained += int(objective.count(inputs))
            positions += here
            # Packed rows have no attention mask, because they have no padding.
            tokens += int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else here
        return cls(trained, tokens, positions)

    def of_all_ranks(self, device: torch.device, context: int = 1) -> StepCounts:
        """The sums over all ranks, on the device; ranks of one `context` count once, and `trained` is at least 1."""
        if ranks.world_size() == 1:
            return StepCounts(max(self.trained, 1), self.tokens, self.positions)
        counts = torch.tensor([self.trained, self.tokens, self.positions], device=device)
        trained, tokens, positions = ranks.summed(counts) // context
        return StepCounts(trained.clamp(min=1), tokens, positions)


@dataclass(frozen=True)
class StepNumbers:
    """Results of a step: mean loss in nats, gradient norm, tokens, and positions (with padding).

    `statistics`: the mean of each of the objective's own; None where nothing was counted.
    """

    loss: float
    grad_norm: float
    tokens: int
    positions: int
    statistics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def are_finite(self) -> bool:
        """Whether the loss and the gradient norm are; a loss that is not may have finite gradients."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @classmethod
    def read(
        cls, loss: torch.Tensor, grad_norm: torch.Tensor, counts: StepCounts, statistics: Statistics | None = None
    ) -> StepNumbers:
        """Read all values at once, before the update: the only device synchronisation of a step."""
        sums = itertools.chain.from_iterable((statistics or {}).values())
        there = [
            value
            for value in (loss, grad_norm, counts.tokens, counts.positions, *sums)
            if isinstance(value, torch.Tensor)
        ]
        read = iter(torch.stack([value.double() for value in there]).tolist())
        loss_, norm = next(read), next(read)
        # With a single rank the counts are already on the host.
        tokens, positions = (
            next(read) if isinstance(count, torch.Tensor) else count for count in (counts.tokens, counts.positions)
        )
        means: dict[str, float | None] = {}
        for name in statistics or {}:
            total, count = next(read), next(read)
            means[name] = _number(total / count) if count else None
        better, worse = means.get("rewards_chosen"), means.get("rewards_rejected")
        if better is not None and worse is not None:  # also for single answers (KTO)
            means.setdefault("rewards_margins", better - worse)
        return cls(loss_, norm, int(tokens), int(positions), means)


@dataclass
class MetricsRecorder:
    """Writes metrics.jsonl, informs the other outlets, and ends a run whose numbers stay non-finite.

    `falls` watches the rewards of an objective that compares answers with a reference.
    """

    outlets: Outlets
    monitor: Monitor
    profiler: Any | None = None
    falls: Falls | None = None
    _skips: Skips = field(default_factory=Skips, init=False)
    _spikes: Spikes = field(default_factory=Spikes, init=False)
    _leaks: LeakWatch = field(default_factory=LeakWatch, init=False)
    _steps: int = field(default=0, init=False)
    _scaled: bool = field(default=False, init=False)
    _started: float = field(default_factory=time.perf_counter, init=False)

    def started(self, progress: Progress) -> None:
        """Called when training starts, or continues after `progress`."""
        self.outlets.listener.started(progress.step, progress.total)
        self._steps = progress.step
        self.restart_clock()
        if self.profiler:
            self.profiler.start()

    def restart_clock(self) -> None:
        """Exclude an evaluation or a save from the next step's time."""
        self._started = time.perf_counter()

    def ended(self) -> None:
        """Called after the last step."""
        if self.profiler:
            self.profiler.stop()

    def saw(self, inputs: Inputs, number: int, peak: Peak) -> None:
        """Watch the peaks of micro-batches for growing memory; `number` is the index within the step."""
        # Peaks grow during the first step, while gradients and optimizer states are created. They also grow from one
        # micro-batch of a step to the next, so each index is compared only with itself.
        if self._steps < 1:
            return
        rows, length = inputs["input_ids"].shape
        if grown := self._leaks.see((rows, length, number), peak):
            text = f"peak memory at {rows} rows of {length} tokens keeps growing: {grown / 2**20:.0f} MiB so far"
            self.outlets.run.event("leak", step=self._steps, rows=rows, length=length, grown_bytes=grown)
            self.outlets.listener.note(text)

    def stepped(
        self, progress: Progress, numbers: StepNumbers, learning_rate: float, updated: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:  # fmt: skip
        """Called after a step, with or without an update. Raises NumbersError if updates keep being skipped."""
        self._steps, self._scaled = progress.step, scaler is not None
        if self.profiler:
            self.profiler.step()
        # Measured between reads of the results: the device has yet to run this step's update.
        seconds = time.perf_counter() - self._started
        line = {
            "step": progress.step,
            "loss": _number(numbers.loss),
            "learning_rate": learning_rate,
            "grad_norm": _number(numbers.grad_norm),
            "epoch": round(progress.epoch, 4),
            "tokens": numbers.tokens,
            "tokens_per_second": round(numbers.tokens / seconds, 1),
            **numbers.statistics,
            "padding_share": round(1 - numbers.tokens / numbers.positions, 4) if numbers.positions else 0.0,
            "memory": self.monitor.take_step(),
            **({} if updated else {"skipped": True}),
        }
        self._started += seconds
        append_line(self.outlets.run.metrics_file, line)
        self.outlets.listener.stepped(line)
        self.outlets.trackers.log("train", line)
        self.outlets.callbacks.stepped(line)
        self._watch(line, progress.updates, scaler)

    def _watch(self, line: dict[str, Any], updates: int, scaler: torch.amp.GradScaler | None) -> None:
        """Report a skipped update or a loss spike; stop if updates keep being skipped."""
        event, note = self.outlets.run.event, self.outlets.listener.note
        step, skipped = line["step"], "skipped" in line
        by_gradient = skipped and line["loss"] is not None
        for_good = self._skips.see(skipped, scaler.get_scale() if scaler and by_gradient else None)
        if skipped:
            name = "loss" if line["loss"] is None else "grad_norm"
            in_a_row, total = self._skips.in_a_row, self._skips.total
            event("update_skipped", step=step, reason=f"{name} is not finite", in_a_row=in_a_row, total=total)
            note(f"step {step}: {name} is not finite; the update is skipped, {total} so far")
            if for_good:
                self._stop(name, step, updates)
        if (median := self._spikes.see(line["loss"])) is not None:
            event("loss_spike", step=step, loss=line["loss"], median=median)
            note(f"step {step}: the loss of {line['loss']:.3f} is far above the previous {median:.3f}")
        rewards = [line.get(name) for name in ("rewards_chosen", "rewards_margins")]
        if self.falls and (means := self.falls.see(*rewards)):
            chosen, margin = means
            event("chosen_falls", step=step, rewards_chosen=chosen, rewards_margins=margin)
            note(
                f"step {step}: the chosen answers have become less likely (reward {chosen:.3f}); the margin of "
                f"{margin:.3f} is from the rejected ones alone. Raise `preference.nll_weight`, or stop earlier"
            )

    def evaluated(self, progress: Progress, loss: float) -> None:
        """Called at the end of an evaluation, inside its phase. Raises NumbersError for a loss that is not finite."""
        line = {"step": progress.step, "eval_loss": _number(loss), "memory": {"evaluation": self.monitor.leave()}}
        self.monitor.take("evaluation")
        append_line(self.outlets.run.metrics_file, line)
        self.outlets.listener.evaluated(line)
        self.outlets.trackers.log("eval", line)
        self.outlets.callbacks.evaluated(line)
        if line["eval_loss"] is None:
            self._stop("eval_loss", progress.step, progress.updates)

    def forget_evaluation(self, progress: Progress) -> None:
        """Delete the record of the evaluation at this step, which is about to be repeated."""
        self.outlets.run.forget_evaluation_at(progress.step)

    def _stop(self, name: str, step: int, updates: int) -> NoReturn:
        self.outlets.run.event("stopped", step=step, reason=f"{name} is not finite")
        saved = self.outlets.run.complete_checkpoints()
        where = (
            f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet (`output.save_every`)"
        )
        raise NumbersError(f"{name} is not finite at step {step}; {where}. {remedy(updates, scaled=self._scaled)}")


def _number(value: float) -> float | None:
    """The value if it is finite, else None, since JSON has no NaN."""
    return value if math.isfinite(value) else None
