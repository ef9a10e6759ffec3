"""The training loop: optimizer steps, and what happens between them.

`Loop.take_step` is one step. Everything else is passed in: out-of-memory retry, metrics with their guards, checkpoints,
evaluation, signals (built by `training.assembly`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.errors import DataError, FinetuneError, Terminated
from finetune.runtime import ranks
from finetune.runtime.randomness import RandomState
from finetune.runtime.signals import Signals
from finetune.training.batches import StepSource
from finetune.training.checkpoints import Checkpoints
from finetune.training.collator import Inputs
from finetune.training.eval_loss import Evaluation
from finetune.training.oom_retry import Retry
from finetune.training.progress import Progress
from finetune.training.recorder import MetricsRecorder, StepCounts, StepNumbers
from finetune.training.state import restore_random
from finetune.training.step import Step


@dataclass(frozen=True)
class Intervals:
    """When a run evaluates and saves: every so many steps (None: only at its end).

    With `save_best` it also saves after each evaluation with the best value so far; `patience` evaluations without
    improvement end it.
    """

    evaluate_every: int | None = None
    save_every: int | None = None
    save_best: bool = False
    patience: int | None = None


@dataclass
class Loop:
    """A run's training, from `progress` to its last step. `evaluation` is None without an evaluation set."""

    step: Step
    schedule: torch.optim.lr_scheduler.LRScheduler
    steps: StepSource
    progress: Progress
    intervals: Intervals
    retry: Retry
    recorder: MetricsRecorder
    checkpoints: Checkpoints
    evaluation: Evaluation | None
    signals: Signals

    def run(self, resumed_from: Path | None) -> None:
        """Train until the last step, early stopping, or the end of the step in which a signal arrived or a callback
        failed.

        Raises DataError for a row that can no longer be read, once the last step is saved.
        """
        self.recorder.started(self.progress)
        if self.evaluation and not resumed_from:
            self._evaluate()
        try:
            steps = self._epoch(resumed_from)
            over = self.evaluate_if_owed()
            while not over:
                for micro_batches in steps:
                    over = self.take_step(micro_batches)
                    del micro_batches  # before the next step's are made
                    if over:
                        break
                else:
                    steps = self._epoch()
        except DataError as error:
            raise self._saved_despite(error) from None
        self.recorder.ended()

    def _epoch(self, resumed_from: Path | None = None) -> Iterator[list[Inputs]]:
        """The remaining steps of the epoch; after a resume, with the random state of an uninterrupted run."""
        epoch, done = divmod(self.progress.step, self.steps.in_epoch)
        # Creating a loader's iterator draws a random number. A checkpoint between epochs was saved before that draw,
        # one within an epoch after it.
        if resumed_from and not done:
            restore_random(resumed_from, ranks.rank())
        steps = self.steps.epoch(epoch, done)
        if resumed_from and done:
            restore_random(resumed_from, ranks.rank())
        return steps

    def take_step(self, micro_batches: list[Inputs]) -> bool:
        """Take one optimizer step, do what is due after it, and return whether it was the last one."""
        step, progress = self.step, self.progress
        counts = StepCounts.of(micro_batches, step.objective).of_all_ranks(step.device, step.context)
        loss = self.retry.fitting_forward_backward(step, micro_batches, counts.trained, progress.step)
        with step.monitor.phase("optimizer"):
            grad_norm = step.clip()
            # A save may overlap only one forward and backward pass: if it fell further behind, a kill could cost more
            # than one save interval.
            self.checkpoints.wait()
            loss, *sums = ranks.summed(torch.cat([loss[None], step.sums]))
            statistics = dict(zip(step.objective.statistics, zip(sums[::2], sums[1::2], strict=True), strict=True))
            numbers = StepNumbers.read(loss / step.engine.world_size, grad_norm, counts, statistics)
            updated = numbers.are_finite
            if updated:
                self.retry.update(step)
            step.rescale()
        rate = self.schedule.get_last_lr()[0]
        if updated:
            self.schedule.step()
            progress.updates += 1
        step.model.zero_grad(set_to_none=True)
        progress.step += 1
        progress.epoch = progress.step / self.steps.in_epoch
        save, stop = self._signalled()
        self.recorder.stepped(progress, numbers, rate, updated, step.engine.scaler)
        return self._after(save, stop)

    def _saved_despite(self, error: DataError) -> DataError:
        """`error`, which came up between two steps or in an evaluation, saying that the last step is saved."""
        progress, alone = self.progress, ranks.world_size() > 1 and not error.shared
        if not progress.step or alone:  # others wait within a pass
            return error
        try:
            ranks.main_does(self.checkpoints.wait)
            if not ranks.main_does(lambda: self.checkpoints.holds(progress)):
                self.checkpoints.save(progress)
                ranks.main_does(self.checkpoints.wait)
            saved = f"Step {progress.step} is saved, from which the run goes on"
        except FinetuneError as unsaved:
            saved = f"Step {progress.step} could not be saved: {unsaved}"
        ending = DataError(f"{error}. {saved}")
        return ranks.shared(ending) if error.shared else ending

    def _after(self, save: bool, stop: bool) -> bool:
        """Evaluate and save if due; return whether the run is over."""
        progress = self.progress
        last = progress.step >= progress.total
        stop |= self._failed_alone
        if self.evaluation and (last or _due(progress.step, self.intervals.evaluate_every)):
            best, ended = self._evaluate_or_postpone(stop)
            save |= best and self.intervals.save_best
            stop |= ended
        over = stop or last or self.stopped_early
        if save or over or _due(progress.step, self.intervals.save_every):
            self.checkpoints.save(progress)
            self.recorder.restart_clock()
        return over

    @property
    def stopped_early(self) -> bool:
        """Whether no evaluation has improved on the best for `patience` of them."""
        patience = self.intervals.patience
        return bool(patience and self.progress.without_gain >= patience)

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self.progress.step >= self.progress.total or self.stopped_early

    def _signalled(self) -> tuple[bool, bool]:
        """Whether a signal to any rank requests a checkpoint, and whether one or a failed callback requests the end."""
        came = ranks.gathered((self.signals.take_save(), self.signals.name, self.recorder.outlets.callbacks.failed))
        # Not `signals.name`: a signal that arrived during the exchange is not known to other ranks until the next step.
        name = next((name for _, name, _ in came if name), None)
        self.signals.take_stop(name)
        return any(save for save, *_ in came), name is not None or any(failed for *_, failed in came)

    @property
    def _failed_alone(self) -> bool:
        """Whether a callback failed and no other rank has to know it first."""
        return self.recorder.outlets.callbacks.failed and self.step.engine.world_size == 1

    def _evaluate_or_postpone(self, stop: bool) -> tuple[bool, bool]:
        """Evaluate after a step; return whether the value is the best so far, and whether a signal ends the run.

        A signal that arrives before the value is known postpones the evaluation to the next start.
        """
        several = self.step.engine.world_size > 1
        try:
            if stop and (several or self.recorder.outlets.callbacks.failed):
                raise _CutShort
            value = self._evaluate()
        except DataError:
            self.progress.owes_evaluation = True
            raise
        except _CutShort:
            self.progress.owes_evaluation = True
            return False, True
        assert self.evaluation is not None
        higher_is_better = self.evaluation.higher_is_better
        best = value is not None and self.progress.gains(value, higher_is_better=higher_is_better)
        # Several ranks act on a signal together, at the end of the next step.
        return best, self._failed_alone or (not several and self.signals.name is not None)

    def _evaluate(self) -> float | None:
        """Record and return the value of the evaluation, if it has one. The random state is preserved."""
        assert self.evaluation is not None
        before = RandomState()
        try:
            with self.step.monitor.phase("evaluation"):
                with self._until_a_signal():
                    value = self.evaluation.value()
                if value is not None:
                    self.recorder.evaluated(self.progress, value)
                return value
        finally:
            self.recorder.restart_clock()
            before.restore()

    @contextlib.contextmanager
    def _until_a_signal(self) -> Iterator[None]:
        """In the block, a signal ends an evaluation at once, except with several ranks: none can leave the others."""
        several = self.step.engine.world_size > 1
        try:
            with self.signals.waiting(several):
                if not several:
                    self.signals.raise_if_received()
                yield
        except (Terminated, KeyboardInterrupt):
            if several or not self.progress.step or self.signals.name is None:
                raise
            raise _CutShort from None

    def evaluate_if_owed(self) -> bool:
        """Run the evaluation that a signal postponed, if any; return whether the run is over after it."""
        if not self.progress.owes_evaluation:
            return False
        self.progress.owes_evaluation = False
        self.recorder.forget_evaluation(self.progress)  # in case an earlier start was killed after this evaluation
        _, ended = self._evaluate_or_postpone(stop=False)
        return ended or self.stopped_early


class _CutShort(Exception):
    """A signal ended an evaluation before its value was known."""


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
