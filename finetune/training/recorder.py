"""What is recorded of each step, and where: metrics.jsonl, the progress display, trackers, the profiler."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from finetune.errors import NumbersError
from finetune.measure.monitor import LeakWatch, Monitor, Peak
from finetune.objectives import Objective
from finetune.runtime import ranks
from finetune.storage.files import append_line
from finetune.storage.rundir import RunDirectory
from finetune.training.collator import Idle, Inputs
from finetune.training.guards import Skips, Spikes
from finetune.training.progress import Progress
from finetune.training.step import Count
from finetune.training.tracking import Trackers


class Listener(Protocol):
    """What a progress display receives. Lines are those of metrics.jsonl."""

    def started(self, first_step: int, last_step: int) -> None: ...

    def stepped(self, line: dict[str, Any]) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class StepCounts:
    """What a step holds, before it is computed: what its loss is divided by, tokens, and places, padding included."""

    trained: Count
    tokens: Count
    places: Count

    @classmethod
    def of(cls, micro_batches: Iterable[Inputs], objective: Objective) -> StepCounts:
        """The counts of this rank's micro-batches, which are still on the host."""
        trained = tokens = places = 0
        for inputs in micro_batches:
            if isinstance(inputs, Idle):
                continue
            here = inputs["input_ids"].numel()
            trained += int(objective.count(inputs))
            places += here
            # Packed rows come without a mask: no place is padding.
            tokens += int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else here
        return cls(trained, tokens, places)

    def of_all_ranks(self, device: torch.device) -> StepCounts:
        """Those of all ranks together, which stay on the device. A loss is divided by 1 where nothing is trained."""
        if ranks.world_size() == 1:
            return StepCounts(max(self.trained, 1), self.tokens, self.places)
        counts = torch.tensor([self.trained, self.tokens, self.places], device=device)
        trained, tokens, places = ranks.summed(counts)
        return StepCounts(trained.clamp(min=1), tokens, places)


class Recorder:
    """Writes metrics.jsonl, informs the listener and the trackers, ends a run whose numbers stay non-finite."""

    def __init__(
        self,
        run: RunDirectory,
        monitor: Monitor,
        listener: Listener,
        trackers: Trackers,
        profiler: Any | None = None,
    ) -> None:
        self.run = run
        self._monitor = monitor
        self._listener = listener
        self._trackers = trackers
        self._profiler = profiler
        self._skips = Skips()
        self._spikes = Spikes()
        self._leaks = LeakWatch()
        self._steps = 0
        self._started = time.perf_counter()

    def started(self, progress: Progress) -> None:
        """Training begins, or goes on after `progress`."""
        self._listener.started(progress.step, progress.total)
        self._steps = progress.step
        self.restart_clock()
        if self._profiler:
            self._profiler.start()

    def restart_clock(self) -> None:
        """Leave an evaluation or a save out of the next step's time."""
        self._started = time.perf_counter()

    def ended(self) -> None:
        """The last step is done."""
        if self._profiler:
            self._profiler.stop()

    def saw(self, inputs: Inputs, number: int, peak: Peak) -> None:
        """Look at the peak of a micro-batch, the `number`th of its step, for memory that keeps growing."""
        # Gradients and optimizer states come into being during the first step, so its peaks grow by right; so do
        # those of a step's later micro-batches, which are therefore distinguished by their position.
        if self._steps < 1:
            return
        rows, length = inputs["input_ids"].shape
        if grown := self._leaks.see((rows, length, number), peak):
            text = f"peak memory at {rows} rows of {length} tokens keeps growing: {grown / 2**20:.0f} MiB so far"
            self.run.event("leak", step=self._steps, rows=rows, length=length, grown_bytes=grown)
            self._listener.note(text)

    def stepped(
        self,
        progress: Progress,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        learning_rate: float,
        counts: StepCounts,
        updated: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """A step is done, with an update or without. Raises NumbersError where updates will be left out for good."""
        self._steps = progress.step
        if self._profiler:
            self._profiler.step()
        mean_loss = _number(ranks.summed(loss) / ranks.world_size())  # waits for the device, whose time is the step's
        seconds = time.perf_counter() - self._started
        tokens, places = int(counts.tokens), int(counts.places)
        line = {
            "step": progress.step,
            "loss": mean_loss,
            "learning_rate": learning_rate,
            "grad_norm": _number(grad_norm),
            "epoch": round(progress.epoch, 4),
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "padding_share": round(1 - tokens / places, 4) if places else 0.0,
            "memory": self._monitor.take_step(),
            **({} if updated else {"skipped": True}),
        }
        self._started += seconds
        append_line(self.run.metrics_file, line)
        self._listener.stepped(line)
        self._trackers.log("train", line)
        self._watch(line, scaler)

    def _watch(self, line: dict[str, Any], scaler: torch.amp.GradScaler | None) -> None:
        """Report a skipped update or a spike of the loss; stop where updates will be skipped for good."""
        step, skipped = line["step"], "skipped" in line
        for_good = self._skips.see(skipped, scaler.get_scale() if scaler and skipped else None)
        if skipped:
            name = "loss" if line["loss"] is None else "grad_norm"
            in_a_row, total = self._skips.in_a_row, self._skips.total
            self.run.event("update_skipped", step=step, reason=f"{name} is not finite", in_a_row=in_a_row, total=total)
            self._listener.note(f"step {step}: {name} is not a finite number; the update is skipped, {total} so far")
            if for_good:
                self._stop(name, step)
        if (median := self._spikes.see(line["loss"])) is not None:
            self.run.event("loss_spike", step=step, loss=line["loss"], median=median)
            self._listener.note(f"step {step}: the loss of {line['loss']:.3f} is far above the {median:.3f} before it")

    def evaluated(self, progress: Progress, loss: float) -> None:
        """An evaluation is done, whose phase is still open. Raises NumbersError for a loss that is not finite."""
        line = {
            "step": progress.step,
            "eval_loss": _number(loss),
            "memory": {"evaluation": self._monitor.leave()},
        }
        self._monitor.take("evaluation")
        append_line(self.run.metrics_file, line)
        self._listener.evaluated(line)
        self._trackers.log("eval", line)
        if line["eval_loss"] is None:
            self._stop("eval_loss", progress.step)

    def forget_evaluation(self, progress: Progress) -> None:
        """Take back the evaluation at this step, which is about to be done again."""
        self.run.forget_evaluation_at(progress.step)

    def _stop(self, name: str, step: int) -> NoReturn:
        self.run.event("stopped", step=step, reason=f"{name} is not finite")
        raise NumbersError(_not_finite(name, step, self.run))


def _number(value: Any) -> float | None:
    """A finite float, or None, which JSON can say; a NaN is never turned into a number."""
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else None


def _not_finite(name: str, step: int, run: RunDirectory) -> str:
    saved = run.complete_checkpoints()
    where = f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet (`output.save_every`)"
    return (
        f"{name} is not a finite number at step {step}; {where}. Lower `training.learning_rate`, lengthen "
        "`training.warmup`, or use bf16 instead of fp16"
    )
