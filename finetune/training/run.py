"""Train a model whose weights, adapter and data are ready, and publish what was trained."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors import SafetensorError
from transformers import set_seed

from finetune.config import Config
from finetune.data import fingerprint
from finetune.data.batching import MicroBatching, RowOrder
from finetune.data.prepare import Prepared
from finetune.errors import FinetuneError, MachineError
from finetune.measure import snapshots
from finetune.measure.monitor import Monitor
from finetune.model import causality, packing
from finetune.model.adapter import casts_by_autocast
from finetune.model.base import autocast
from finetune.objectives import OBJECTIVES, log_probs
from finetune.runtime import libraries, ranks
from finetune.runtime.signals import Signals
from finetune.storage.files import not_written, staged
from finetune.storage.rundir import RunDirectory
from finetune.training import oom_retry, optimizers, schedules
from finetune.training.batches import Steps
from finetune.training.checkpoints import Checkpoints
from finetune.training.collator import Inputs, MicroBatches, row_count
from finetune.training.evaluation import Evaluation
from finetune.training.largest_batch import warm_up
from finetune.training.loop import Loop, Rhythm
from finetune.training.oom_retry import Retry
from finetune.training.progress import Progress, read_progress
from finetune.training.recorder import Listener, Recorder
from finetune.training.state import problems_of, restore, restore_weights, save_weights
from finetune.training.step import Step
from finetune.training.tracking import Trackers


@dataclass(frozen=True)
class Outcome:
    """How training ended: the last step and, where there were evaluations, the step of the best one."""

    steps: int
    best_step: int | None


def train(
    config: Config,
    model: Any,
    tokenizer: Any,
    data: Prepared,
    run: RunDirectory,
    monitor: Monitor,
    listener: Listener,
    *,
    device: torch.device,
    signals: Signals,
    made_with: dict[str, Any],
    resume_from: Path | None = None,
) -> Outcome:
    """Run the optimizer steps and write `adapter/` (or `merged/`, where every weight was trained).

    `made_with` goes into each checkpoint's manifest; `resume_from` is a checkpoint that was verified. Raises
    NumbersError for a loss that is not finite, MachineError when a checkpoint cannot be written, ArtifactError when one
    does not fit, and Terminated or KeyboardInterrupt after the save that a signal asked for.
    """
    with autocast(config.training.precision, device), libraries.without_cudnn_attention():
        if config.data.packing:
            packing.prove(model)
        causality.prove(model)
    set_seed(config.training.seed)
    accelerator = _accelerator(config, run, device)
    with contextlib.closing(Trackers(accelerator, config.tracking, run, config)) as trackers:
        loop = _loop(
            config, model, tokenizer, data, run, monitor, listener, device, signals, made_with, resume_from,
            accelerator, trackers,
        )  # fmt: skip
        initial = _keep_initial_adapter(config, model, run) if ranks.is_main() else None
        casting = casts_by_autocast(model, config.adapter, config.training.precision)
        with (
            signals.waiting(), libraries.without_cudnn_attention(), casting, log_probs.tiles(config.memory.loss_tokens),
        ):  # fmt: skip
            _fit(loop, config, run, listener, resume_from)
    progress = loop.progress
    # The ranks' model holds their process group, and must not be the last to do so: it would end the group's threads
    # with Python's lock held, for which they may be waiting (torch 2.13, ProcessGroupGloo).
    del loop
    ranks.leave()  # the first one does the rest alone
    signals.end(f"step {progress.step} is saved in {run.checkpoints}")
    if ranks.is_main():
        if config.output.best and (best := _best_checkpoint(progress, run, listener)):
            restore_weights(model, best)
            run.event("best_loaded", step=progress.best_step)
        _publish(config, model, tokenizer, made_with["base"], run, initial)
    return Outcome(progress.step, progress.best_step)


# -- what the loop is given --------------------------------------------------------------------------------------------


def _accelerator(config: Config, run: RunDirectory, device: torch.device) -> Accelerator:
    """accelerate's part: the ranks' shared model, and the trackers. Autocast and loss scaling are the step's own."""
    # What an earlier run in this process, or a notebook's own Trainer, settled holds for the process; accelerate 1.15
    # has no public way to begin anew.
    AcceleratorState._reset_state()  # noqa: SLF001
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",  # and not what `accelerate launch` was told
        log_with=list(config.tracking.to) or None,
        project_dir=str(run.path / "tensorboard"),
    )


def _loop(
    config: Config,
    model: Any,
    tokenizer: Any,
    data: Prepared,
    run: RunDirectory,
    monitor: Monitor,
    listener: Listener,
    device: torch.device,
    signals: Signals,
    made_with: dict[str, Any],
    resume_from: Path | None,
    accelerator: Accelerator,
    trackers: Trackers,
) -> Loop:
    training = config.training
    name, replaced = optimizers.choose(config.optimizer, device.type)
    if replaced:
        listener.note(replaced)
    log_probs.attach(model)
    recorder = Recorder(
        run, monitor, listener, trackers, snapshots.profiler(config.memory.profile_steps, run.profile, device)
    )
    step = Step(
        model=model,
        objective=OBJECTIVES[training.objective],
        optimizer=optimizers.make(name, config.optimizer, training.learning_rate, model),
        precision=training.precision,
        max_grad_norm=training.max_grad_norm,
        masked=causality.needs_mask(model.config, training.precision, causality.capability_of(device)),
        device=device,
        monitor=monitor,
        scaler=torch.amp.GradScaler(device.type) if training.precision == "fp16" else None,
        seen=recorder.saw,
    )
    if ranks.world_size() > 1:
        step.world_size = ranks.world_size()
        step.shared = accelerator.prepare_model(model, device_placement=False)
        step.local = functools.partial(accelerator.no_sync, step.shared)
    collate = MicroBatches(
        MicroBatching.of(training, config.data), tokenizer.pad_token_id, ranks.rank(), ranks.world_size()
    )
    order = RowOrder(data.train["length"][:], training.batch_size, training.seed, training.group_by_length)
    steps = Steps(data.train, order, collate, training.batch_size, pinned=device.type == "cuda")
    progress = read_progress(resume_from) if resume_from else Progress()
    progress.total = steps.in_all(training)
    schedule = schedules.scheduler(training, step.optimizer, progress.total)
    checkpoints = Checkpoints(
        step, schedule, run, monitor, keep=config.output.keep, made_with=made_with,
        verified=[resume_from] if resume_from else [],
    )  # fmt: skip
    on_oom = _OutOfMemory(run, listener, progress, checkpoints, data, device)
    evaluation = None
    if data.eval is not None:
        evaluation = Evaluation(
            step, data.eval, collate, training.batch_size, split=on_oom.evaluation_split, skip=on_oom.no_evaluation
        )
    return Loop(
        step=step,
        schedule=schedule,
        steps=steps,
        progress=progress,
        rhythm=Rhythm(training.eval_every, config.output.save_every, config.output.best, training.early_stopping),
        retry=Retry(on_oom.split, on_oom.give_up, on_oom.updated_again),
        recorder=recorder,
        checkpoints=checkpoints,
        evaluation=evaluation,
        signals=signals,
        monitor=monitor,
    )


@dataclass(frozen=True)
class _OutOfMemory:
    """What a run records, says and saves where memory runs out."""

    run: RunDirectory
    listener: Listener
    progress: Progress
    checkpoints: Checkpoints
    data: Prepared
    device: torch.device

    def split(self, inputs: Inputs, **fields: Any) -> None:
        rows, tokens = row_count(inputs), inputs["input_ids"].shape[1]
        packed = "packed into" if "cu_seq_lens_q" in inputs else "of"
        self.run.event("micro_batch_split", step=self.progress.step + 1, rows=rows, tokens=tokens, **fields)
        self.listener.note(
            f"out of memory at {rows} rows {packed} {tokens} tokens: split in two, as all of that size from now on"
        )

    def evaluation_split(self, inputs: Inputs) -> None:
        self.split(inputs, evaluation=True)

    def updated_again(self) -> None:
        self.run.event("update_retried", step=self.progress.step + 1)

    def no_evaluation(self, inputs: Inputs) -> None:
        place, tokens = oom_retry.place_of(self.data.eval, inputs), inputs["input_ids"].numel()
        self.run.event("evaluation_skipped", step=self.progress.step, place=place, tokens=tokens)
        self.listener.note(f"no evaluation: out of memory at {place} alone, {tokens} tokens; training goes on")

    def give_up(self, error: BaseException, inputs: Inputs) -> None:
        """Say on `error` which row is too large, and save what the steps before have trained."""
        place, step = oom_retry.place_of(self.data.train, inputs), self.progress.step
        tokens = inputs["input_ids"].numel()
        self.run.event("row_does_not_fit", step=step + 1, place=place, tokens=tokens)
        error.add_note(f"The row that does not fit, alone in its micro-batch: {place}, {tokens} tokens.")
        if self.device.type == "cpu":  # elsewhere it stays, for the allocator's snapshot; saving needs the host's
            oom_retry.release(error)
        try:
            self.checkpoints.wait()
            if step == 0 or self.checkpoints.holds(self.progress):
                return
            self.checkpoints.save(self.progress)
            self.checkpoints.wait()
        except (FinetuneError, MemoryError, RuntimeError) as unsaved:
            error.add_note(f"Step {step} could not be saved: {unsaved}.")
        else:
            error.add_note(f"Step {step} was saved.")


# -- training ----------------------------------------------------------------------------------------------------------


def _fit(loop: Loop, config: Config, run: RunDirectory, listener: Listener, resume_from: Path | None) -> None:
    """Train to the end, or to the end of the step in which a signal came; the last save is awaited either way."""
    if resume_from:
        restore_weights(loop.step.model, resume_from)
        if loop.is_over:
            loop.evaluate_if_owed()
            return
        restore(loop.step, loop.schedule, resume_from)
        _note_other_schedule(loop, config, run, listener, resume_from)
    started = time.perf_counter()
    peaks = warm_up(loop.step, loop.steps, loop.retry, loop.evaluation)
    seconds = round(time.perf_counter() - started, 3)
    run.event("largest_batch_fits", step=loop.progress.step, seconds=seconds, memory=peaks)
    try:
        loop.run(resume_from)
        # A launcher that sees one rank end after a signal leaves the others half a minute.
        ranks.main_does(loop.checkpoints.wait)
    except KeyboardInterrupt:  # the second one, which does not wait for anything
        raise
    except BaseException:
        with contextlib.suppress(FinetuneError):  # the first error is the one to report
            loop.checkpoints.wait()
        raise


def _note_other_schedule(loop: Loop, config: Config, run: RunDirectory, listener: Listener, resume_from: Path) -> None:
    """Write down that the job is longer or shorter than when the checkpoint was made, which moves the learning rate."""
    training, now, then = config.training, loop.progress.total, read_progress(resume_from).total
    done = loop.schedule.last_epoch
    if not done or then == now:
        return
    before, after = schedules.rate(training, done, then), schedules.rate(training, done + 1, now)
    run.event("schedule_changed", step=done, steps=[then, now], learning_rate=[before, after])
    listener.note(
        f"the schedule now ends at step {now}, not {then}: the learning rate goes from {before:.2e} at step "
        f"{done} to {after:.2e} at the next, and on as `training.schedule: {training.schedule}` says"
    )


# -- what is published -------------------------------------------------------------------------------------------------


def _best_checkpoint(progress: Progress, run: RunDirectory, listener: Listener) -> Path | None:
    """The checkpoint of the best evaluation, where it is on disk and not simply the last one."""
    best = progress.best_step
    if not best or best == progress.step:
        return None
    path = run.checkpoint(best)
    if not path.is_dir():
        return None
    if problems := problems_of(path):
        run.event("best_damaged", step=best, problems=problems)
        listener.note(f"{path}, the best, cannot be used ({'; '.join(problems)}); the last is exported instead")
        return None
    return path


def _keep_initial_adapter(config: Config, model: Any, run: RunDirectory) -> Path | None:
    """PiSSA moves part of the base into the adapter. Keep its start, so that what is published fits the plain base."""
    if config.adapter.init != "pissa":
        return None
    folder = run.path / "adapter_initial"
    with staged(folder) as partial:
        save_weights(model, partial)
    return folder


def _publish(
    config: Config, model: Any, tokenizer: Any, base: str | None, run: RunDirectory, initial: Path | None
) -> None:
    """Write the trained weights where other tools look for them; the directory appears when it is whole."""
    target = run.merged if config.adapter.kind == "none" else run.adapter
    try:
        with staged(target) as folder:
            if initial:
                # W = residual + B0 A0, so the update on W is BA - B0 A0: an adapter of twice the rank (PiSSA, 3.3).
                save_weights(model, folder, path_initial_model_for_weight_conversion=str(initial))
            else:
                save_weights(model, folder)
            fingerprint.save(tokenizer, base, folder)
    except (OSError, SafetensorError) as error:  # safetensors 0.8 makes its own of a full disk
        raise MachineError(not_written(target, error)) from None
    if initial:
        shutil.rmtree(initial)
