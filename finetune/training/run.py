"""Trains a prepared model and publishes the trained weights."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import set_seed

from finetune.errors import NumbersError
from finetune.model.distributed.engine import WholeWeights
from finetune.runtime import ranks
from finetune.training import guards, model_setup, publishing, reference_scores, schedules
from finetune.training.assembly import assemble
from finetune.training.batches import StepSource
from finetune.training.job import Outcome, Process, TrainingJob
from finetune.training.loop import Loop
from finetune.training.progress import Progress, read_progress
from finetune.training.recorder import Outlets
from finetune.training.state import restore, restore_weights, updates_in, whole_weights
from finetune.training.warm_up import warm_up

__all__ = ["Outcome", "Outlets", "Process", "TrainingJob", "train"]


def train(job: TrainingJob, steps: StepSource | None = None) -> Outcome:
    """Run the optimizer steps of a `complete` job and write `adapter/` (or `merged/` if every weight was trained).

    The steps are those of `steps`, by default of the prepared rows. Raises NumbersError for a loss that is not finite
    or if every update was skipped, MachineError if a checkpoint cannot be written, ArtifactError if one does not fit
    the job, and Terminated or KeyboardInterrupt after a signal and its checkpoint, or the exception of a callback after
    that of its step.
    """
    loop = prepare(job, steps)
    with job.process.signals.waiting(), model_setup.in_training(job):
        take_steps(job, loop)
    ended = wind_down(job, loop)
    # The DDP model references the process group and must not be the last to do so: its destructor would join the
    # group's threads while holding the GIL, for which they may be waiting (torch 2.13, ProcessGroupGloo).
    del loop
    ranks.leave()  # rank 0 does the rest alone
    return finish(job, ended)


def prepare(job: TrainingJob, steps: StepSource | None = None) -> Loop:
    """Assemble the loop, and keep the adapter as it is before the first step."""
    set_seed(job.config.training.seed)
    loop = assemble(job, steps)
    if ranks.is_main():
        publishing.keep_initial_adapter(job)
    return loop


def take_steps(job: TrainingJob, loop: Loop) -> None:
    """Train to the end, or to the end of the step in which a signal arrived, and wait for the last save."""
    reference_scores.add(job, loop)  # while the weights are those that training starts from
    if job.resume_from:
        loop.progress.updates = updates_in(job.resume_from)
        restore_weights(loop.step.engine, job.resume_from)
        if loop.is_over:
            job.outlets.listener.note(
                f"nothing is left to train: step {loop.progress.step} is saved, and the run ends "
                + ("early" if loop.stopped_early else f"at step {loop.progress.total}")
            )
            loop.evaluate_if_owed()
            return
        restore(loop.step, loop.schedule, job.resume_from)
        _note_other_schedule(job, loop, job.resume_from)
    started = time.perf_counter()
    peaks = warm_up(loop.step, loop.steps, loop.retry, loop.evaluation)
    seconds = round(time.perf_counter() - started, 3)
    job.outlets.run.event("largest_batch_fits", step=loop.progress.step, seconds=seconds, memory=peaks)
    try:
        loop.run(job.resume_from)
        # After a signal, a launcher kills the other ranks half a minute after the first one ends.
        ranks.main_does(loop.checkpoints.wait)
    except KeyboardInterrupt:  # the second one: end without waiting
        raise
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            loop.checkpoints.wait()
        raise


@dataclass(frozen=True)
class Ended:
    """The remains of a loop: its progress, and on rank 0 the whole weights that ranks held in parts."""

    progress: Progress
    whole: dict[str, torch.Tensor] | None


def wind_down(job: TrainingJob, loop: Loop) -> Ended:
    """Gather the weights while all ranks are there, and close the engine."""
    progress, callbacks, engine = loop.progress, job.outlets.callbacks, loop.step.engine
    callbacks.share()
    if loop.stopped_early:
        job.outlets.listener.note(
            f"stopped early at step {progress.step} of {progress.total}: the eval loss has not improved for "
            f"{progress.without_gain} evaluations. To continue, raise or remove `training.early_stopping`"
        )
    whole = None
    if engine.holds_parts:
        # A signal that another rank alone received ends this one too, which cannot publish without it.
        ended_by = next(filter(None, ranks.gathered(job.process.signals.name)), None)
        job.process.signals.take_stop(ended_by)
        if not callbacks.failed and not ended_by:
            best = ranks.main_does(lambda: publishing.best_checkpoint(job, progress))
            publishing.load_best(job, engine, best)
            whole = whole_weights(engine)
    engine.close()
    return Ended(progress, whole)


def finish(job: TrainingJob, ended: Ended) -> Outcome:
    """Publish on rank 0 alone, unless the run was stopped."""
    progress, callbacks, run = ended.progress, job.outlets.callbacks, job.outlets.run
    job.process.signals.raise_if_received(f"step {progress.step} is saved in {run.checkpoints}")
    if callbacks.error:
        run.event("stopped", step=progress.step, reason=f"{type(callbacks.error).__name__} in a callback")
        callbacks.raise_error(f"Step {progress.step} is saved in {run.checkpoints}")
    if not progress.updates:
        run.event("stopped", step=progress.step, reason="every update was skipped")
        raise NumbersError(
            f"every update up to step {progress.step} was skipped, because the loss or its gradient was not finite: "
            f"there is nothing to publish. {guards.remedy(0, scaled=job.config.training.precision == 'fp16')}"
        )
    if ranks.is_main():
        if not ended.whole:
            publishing.load_best(job, WholeWeights(job.model), publishing.best_checkpoint(job, progress))
        publishing.publish(job, ended.whole)
    return Outcome(progress.step, progress.best_step)


def _note_other_schedule(job: TrainingJob, loop: Loop, resume_from: Path) -> None:
    """Record that the number of steps has changed since the checkpoint, and the learning rate with it."""
    training, now, then = job.config.training, loop.progress.total, read_progress(resume_from).total
    done = loop.schedule.last_epoch
    if not done or then == now:
        return
    before, after = schedules.rate(training, done, then), schedules.rate(training, done + 1, now)
    warmup = schedules.warmup_steps(training, now)
    rises = f"rises until step {warmup} (`training.warmup`), " if done + 1 < warmup else ""
    job.outlets.run.event("schedule_changed", step=done, steps=[then, now], learning_rate=[before, after])
    job.outlets.listener.note(
        f"the schedule now ends at step {now}, not {then}: the learning rate goes from {before:.2e} at step "
        f"{done} to {after:.2e} at the next, {rises}"
        f"then follows `training.schedule: {training.schedule}`"
    )
