"""Trains a prepared model and publishes the trained weights."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import set_seed

from finetune import kernels
from finetune.config import Config
from finetune.data import fingerprint
from finetune.data.batching import RowOrder, Sizes
from finetune.data.prepare import ROWS_TO_JUDGE, Prepared
from finetune.errors import ConfigError, FinetuneError, MachineError, NumbersError
from finetune.kernels import compiled
from finetune.measure import snapshots
from finetune.measure.monitor import Monitor
from finetune.measure.out_of_memory import while_writing
from finetune.model import build
from finetune.model.adapters import adapter_files, plain_peft, published
from finetune.model.adapters.adapter import casts_by_autocast
from finetune.model.distributed import context, sharding
from finetune.model.distributed.zero import Zero
from finetune.model.precision import autocast
from finetune.model.probes import causality
from finetune.model.recompute.checkpointing import ByLength
from finetune.model.source import chat_template, identity
from finetune.objectives import OBJECTIVES, log_probs
from finetune.runtime import libraries, rank_watch, ranks
from finetune.runtime.signals import Signals
from finetune.storage.files import not_written, staged
from finetune.storage.records import UpTo
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training import guards, oom_retry, optimizers, probe_table, schedules
from finetune.training.batches import Steps
from finetune.training.callbacks import Callback, Callbacks
from finetune.training.checkpoints import Checkpoints
from finetune.training.collator import Inputs, MicroBatches, micro_batching, row_count, tokens_a_row
from finetune.training.eval_loss import Evaluation
from finetune.training.largest_batch import warm_up
from finetune.training.loop import Loop, Rhythm
from finetune.training.noise import Noise
from finetune.training.oom_retry import Retry
from finetune.training.probe_table import Subject
from finetune.training.progress import Progress, read_progress
from finetune.training.recorder import Listener, Recorder
from finetune.training.replica import Replica
from finetune.training.state import problems_of, restore, restore_weights, save_weights, updates_in, whole_weights
from finetune.training.step import Step
from finetune.training.strategies import STRATEGIES
from finetune.training.tracking import Trackers


@dataclass(frozen=True)
class Outcome:
    """How training ended: the last step, and the step of the best evaluation, if any."""

    steps: int
    best_step: int | None


@dataclass(frozen=True)
class Job:
    """Everything a run needs to train.

    `architecture` is transformers' config of the base, which publishing needs without its files. `provenance` is
    written into each checkpoint's manifest; `resume_from` is a verified checkpoint. `by_length`: what short
    micro-batches recompute, where that is less than the config says.
    """

    config: Config
    architecture: Any
    model: Any
    tokenizer: Any
    data: Prepared
    run: RunDirectory
    monitor: Monitor
    listener: Listener
    trackers: Trackers
    device: torch.device
    signals: Signals
    provenance: dict[str, Any]
    resume_from: Path | None = None
    by_length: Sequence[UpTo] = ()
    callbacks: Iterable[Callback] = ()


def train(job: Job) -> Outcome:
    """Run the optimizer steps and write `adapter/` (or `merged/` if every weight was trained).

    Raises NumbersError for a loss that is not finite or if every update was skipped, MachineError if a checkpoint
    cannot be written, ArtifactError if one does not fit the job, and Terminated or KeyboardInterrupt after a signal and
    its checkpoint, or the exception of a callback after that of its step.
    """
    config, model, run = job.config, job.model, job.run
    with autocast(config.training.precision, job.device), libraries.without_cudnn_attention():
        attached = _fuse(job)
        probe_table.run("built", Subject(config, model))
        if config.kernels.compile == "layers":
            _compile(job, attached)
        fused_loss = _attach_loss(job)
    set_seed(config.training.seed)
    callbacks = Callbacks(job.callbacks if ranks.is_main() else ())
    loop = _loop(job, callbacks)
    initial = _keep_initial_adapter(job) if ranks.is_main() else None
    casting = casts_by_autocast(model, config.adapter, config.training.precision)
    tiles = log_probs.tiles(config.memory.loss_tokens, fused=fused_loss)
    with job.signals.waiting(), libraries.without_cudnn_attention(), casting, tiles, _splitting(job):
        _fit(job, loop)
    callbacks.share()
    progress = loop.progress
    if loop.stopped_early:
        job.listener.note(
            f"stopped early at step {progress.step} of {progress.total}: the eval loss has not improved for "
            f"{progress.without_gain} evaluations. To continue, raise or remove `training.early_stopping`"
        )
    whole = None
    # A signal that another rank alone received ends this one too, which cannot publish without it.
    ended_by = next(filter(None, ranks.gathered(job.signals.name)), None) if loop.step.cut else None
    job.signals.take_stop(ended_by)
    if loop.step.cut and not callbacks.failed and not ended_by:
        _load_best(job, ranks.main_does(lambda: _best_checkpoint(job, progress)))
        whole = whole_weights(model)
    # The DDP model references the process group and must not be the last to do so: its destructor would join the
    # group's threads while holding the GIL, for which they may be waiting (torch 2.13, ProcessGroupGloo).
    if loop.step.zero:
        loop.step.zero.close()
    del loop
    ranks.leave()  # rank 0 does the rest alone
    job.signals.end(f"step {progress.step} is saved in {run.checkpoints}")
    if callbacks.error:
        run.event("stopped", step=progress.step, reason=f"{type(callbacks.error).__name__} in a callback")
        callbacks.raise_error(f"Step {progress.step} is saved in {run.checkpoints}")
    if not progress.updates:
        run.event("stopped", step=progress.step, reason="every update was skipped")
        raise NumbersError(
            f"every update up to step {progress.step} was skipped, because the loss or its gradient was not finite: "
            f"there is nothing to publish. {guards.remedy(0, scaled=config.training.precision == 'fp16')}"
        )
    if ranks.is_main():
        if not whole:
            _load_best(job, _best_checkpoint(job, progress))
        _publish(job, initial, whole)
    return Outcome(progress.step, progress.best_step)


# -- what the loop is given --------------------------------------------------------------------------------------------


def _fuse(job: Job) -> kernels.Attached:
    """Attach fused kernels where they apply. Raises ConfigError if `kernels.fused: on` cannot be satisfied."""
    fused = job.config.kernels.fused
    triton = job.device.type != "cuda" or libraries.triton_obstacle() is None
    attached = kernels.attach(job.model, fused, triton=triton)
    unlike = probe_table.run("fused", Subject(job.config, job.model, attached))
    if fused == "on" and (unlike or not any(attached.replaced.values())):
        raise ConfigError(f"`kernels.fused: on`: {'; '.join([*attached.lines, *unlike])}; set `auto` or `off`")
    fused_now = ", ".join(f"{len(modules)} {name}" for name, modules in attached.replaced.items() if modules)
    for line in (*([f"kernels: fused {fused_now}"] if fused_now else []), *attached.lines, *unlike):
        job.listener.note(line)
    return attached


def _attach_loss(job: Job) -> bool:
    """Let the model score labels; whether the fused loss does.

    Raises ConfigError for a model whose loss would be another one, and if `kernels.fused: on` cannot be.
    """
    if unbalanced := log_probs.attach(job.model):
        job.listener.note(unbalanced)
    unlike = probe_table.run("scoring", Subject(job.config, job.model))
    fused = job.config.kernels.fused
    if unlike and fused == "on":
        raise ConfigError(f"`kernels.fused: on`: {'; '.join(unlike)}; set `auto` or `off`")
    for line in unlike:
        job.listener.note(line)
    return fused != "off" and not unlike


def _compile(job: Job, attached: kernels.Attached) -> None:
    """Compile the layers that are not fused. Raises MachineError where nothing can be compiled."""
    if obstacle := compiled.obstacle() if job.device.type == "cpu" else libraries.triton_obstacle():
        raise MachineError(f"`kernels.compile: layers`: {obstacle}; install a compiler, or set `none`")
    for line in compiled.attach(job.model, attached):
        job.listener.note(line)


def _loop(job: Job, callbacks: Callbacks) -> Loop:
    config, training, run = job.config, job.config.training, job.run
    profiler = snapshots.profiler(config.memory.profile_steps, run.profile, job.device)
    recorder = Recorder(run, job.monitor, job.listener, job.trackers, profiler, callbacks)
    steps = _steps(job)
    step = _step(job, recorder, steps.collate)
    progress = read_progress(job.resume_from) if job.resume_from else Progress()
    progress.total = steps.in_all(training)
    schedule = schedules.scheduler(training, step.optimizer, progress.total)
    checkpoints = Checkpoints(
        step, schedule, run, job.monitor, keep=config.output.keep, provenance=job.provenance,
        verified=[job.resume_from] if job.resume_from else [], saved=callbacks.saved,
        confirm=identity.Mapped(config.model).check if job.device.type == "cpu" else lambda: None,
    )  # fmt: skip
    on_oom = _OutOfMemory(config, run, job.listener, progress, checkpoints, job.data, job.device)
    ranks.before_starting_again(on_oom.record)
    evaluation = None
    if job.data.eval is not None:
        evaluation = Evaluation(
            step, job.data.eval, steps.collate, steps.batch_size,
            split=functools.partial(on_oom.split, evaluation=True), skip=on_oom.no_evaluation,
            start_again=functools.partial(on_oom.start_again, of_evaluation=True),
        )  # fmt: skip
    return Loop(
        step=step,
        schedule=schedule,
        steps=steps,
        progress=progress,
        rhythm=Rhythm(
            training.eval_every,
            config.output.save_every,
            config.output.best and job.data.judges,
            training.early_stopping,
        ),
        retry=Retry(
            on_oom.split,
            on_oom.give_up,
            on_oom.updated_again,
            on_oom.recompute_more,
            on_oom.start_again,
        ),
        recorder=recorder,
        checkpoints=checkpoints,
        evaluation=evaluation,
        signals=job.signals,
        monitor=job.monitor,
        callbacks=callbacks,
    )


def _step(job: Job, recorder: Recorder, collate: MicroBatches) -> Step:
    model, device, training = job.model, job.device, job.config.training
    updated_on = next(weight.device.type for weight in model.parameters() if weight.requires_grad)
    name, replaced = optimizers.choose(job.config.optimizer, updated_on)
    if replaced:
        job.listener.note(replaced)
    step = Step(
        model=model,
        objective=OBJECTIVES[training.objective],
        optimizer=optimizers.make(name, job.config.optimizer, training.learning_rate, model),
        precision=training.precision,
        max_grad_norm=training.max_grad_norm,
        masked=causality.needs_mask(model.config, training.precision, causality.capability_of(device)),
        device=device,
        monitor=job.monitor,
        scaler=torch.amp.GradScaler(device.type) if training.precision == "fp16" else None,
        noise=Noise(model, alpha, training.seed) if (alpha := training.neftune_noise_alpha) else None,
        levels=ByLength(model, job.config.memory.checkpointing, job.by_length) if job.by_length else None,
        seen=recorder.saw,
    )
    step.world_size = ranks.world_size()
    step.context = job.config.distributed.context
    if STRATEGIES[job.config.distributed.kind].deepspeed:
        step.zero = step.shared = Zero(model, step.optimizer, job.config.distributed, training.max_grad_norm, device)
        step.optimizer, step.local = step.zero.rates, step.zero.local
    elif step.world_size > 1 and not sharding.is_sharded(model):
        replica = Replica(model)
        step.shared, step.local = replica.shared, replica.local
        if step.context == 1:
            step.catch_up = functools.partial(replica.catch_up, step, collate.idle())
    return step


def _steps(job: Job) -> Steps:
    training, rows = job.config.training, job.data.train
    way = micro_batching(training, job.config.data)
    collate = MicroBatches(
        way, job.tokenizer.pad_token_id, ranks.rank(), ranks.world_size(), job.config.distributed.context
    )
    order = RowOrder(Sizes.of(rows, way).lengths, training.batch_size, training.seed, training.group_by_length)
    return Steps(rows, order, collate, training.batch_size, on_card=job.device.type == "cuda")


@contextlib.contextmanager
def _splitting(job: Job) -> Iterator[None]:
    """Split rows over `distributed.context` ranks, of which none then refers to the group that they form."""
    group = ranks.group_of(job.config.distributed.context)
    with autocast(job.config.training.precision, job.device):
        probe_table.run("split", Subject(job.config, job.model, group=group))
    with context.split(job.model, group):
        yield


@dataclass(frozen=True)
class _OutOfMemory:
    """Callbacks that record and report running out of memory, and save the state before giving up."""

    config: Config
    run: RunDirectory
    listener: Listener
    progress: Progress
    checkpoints: Checkpoints
    data: Prepared
    device: torch.device

    def split(self, inputs: Inputs, **fields: Any) -> None:
        rows, tokens = row_count(inputs), inputs["input_ids"].shape[1]
        packed = "packed into" if "cu_seq_lens_q" in inputs else "of"
        where = f" on rank {fields['rank']}" if "rank" in fields else ""
        self.run.event("micro_batch_split", step=self.progress.step + 1, rows=rows, tokens=tokens, **fields)
        self.listener.note(
            f"out of memory{where} at {rows} rows {packed} {tokens} tokens: split in two, as are all of this size from "
            "now on"
        )

    def updated_again(self) -> None:
        self.run.event("update_retried", step=self.progress.step + 1)

    def recompute_more(self, inputs: Inputs, **rank: int) -> None:
        rows, tokens = row_count(inputs), tokens_a_row(inputs)
        where = f" on rank {rank['rank']}" if rank else ""
        self.run.event("recomputes_more", step=self.progress.step + 1, rows=rows, tokens=tokens, **rank)
        self.listener.note(
            f"out of memory{where} at {rows} rows of {tokens} tokens, which recomputed less than longer ones: from now "
            "on all recompute as much as the longest"
        )

    def no_evaluation(self, inputs: Inputs) -> None:
        place, tokens = oom_retry.place_of(self.data.eval, inputs), inputs["input_ids"].numel()
        self.run.event("evaluation_skipped", step=self.progress.step, place=place, tokens=tokens)
        self.listener.note(f"no evaluation: out of memory at {place} alone, {tokens} tokens; training continues")

    def start_again(self, error: BaseException, inputs: Inputs, *, of_evaluation: bool = False) -> None:
        """Have all ranks agree on a smaller micro-batch and start again; returns, with a note on `error`, if not."""
        several = ranks.world_size() > 1
        shares = self.config.distributed.shares(ranks.world_size())
        if not (lowered := oom_retry.smaller(inputs, self.config, shares)):
            rows = self.data.eval if of_evaluation else self.data.train
            self._name_row(error, rows, inputs, **({"rank": ranks.rank()} if several else {}))
            return
        failure = {
            "rank": ranks.rank(), "rows": row_count(inputs), "tokens": inputs["input_ids"].shape[1], "lowered": lowered,
        }  # fmt: skip
        try:
            ranks.start_again(failure)
        except MachineError as unrecorded:
            error.add_note(f"The ranks cannot start again with smaller micro-batches: {unrecorded}.")
        else:
            error.add_note(f"Start the same again: it goes on with {oom_retry.named(lowered)}.")

    def record(self, failure: rank_watch.Failure) -> None:
        """On rank 0, before all ranks start again: keep what they have agreed on, and the save under way."""
        self.checkpoints.finish()
        self.run.event(
            "micro_batch_lowered", step=self.progress.step + 1, settings=oom_retry.settings(self.config), **failure
        )
        where = f" on rank {failure['rank']}" if ranks.world_size() > 1 else ""
        self.listener.note(
            f"out of memory{where} at {failure['rows']} rows of {failure['tokens']} tokens: this step cannot be "
            f"repeated, so the run has {oom_retry.named(failure['lowered'])} from its next start on"
        )

    def _name_row(self, error: BaseException, rows: Any, inputs: Inputs, **rank: int) -> None:
        place = oom_retry.place_of(rows, inputs)
        tokens = inputs["input_ids"].numel()
        with contextlib.suppress(MachineError):  # a disk that is full as well must not hide why the run ends
            self.run.event("row_does_not_fit", step=self.progress.step + 1, place=place, tokens=tokens, **rank)
        where = f", on rank {rank['rank']}" if rank else ""
        error.add_note(f"The row that does not fit, alone in its micro-batch{where}: {place}, {tokens} tokens.")

    def give_up(self, error: BaseException, inputs: Inputs, **rank: int) -> None:
        """Add a note to `error` that names the row, and save the state of the last completed step."""
        step = self.progress.step
        self._name_row(error, self.data.train, inputs, **rank)
        if self.device.type == "cpu":  # saving needs host memory; GPU memory is kept for the allocator's snapshot
            oom_retry.release(error)
        try:
            ranks.main_does(self.checkpoints.wait)
            if step == 0 or ranks.main_does(lambda: self.checkpoints.holds(self.progress)):
                return
            with ranks.agreeing():  # memory may run out again, on the rank that copies the weights
                self.checkpoints.save(self.progress)
            ranks.main_does(self.checkpoints.wait)
        except (FinetuneError, MemoryError, OSError, RuntimeError) as unsaved:
            error.add_note(f"Step {step} could not be saved: {unsaved}.")
        else:
            error.add_note(f"Step {step} was saved.")


# -- training ----------------------------------------------------------------------------------------------------------


def _fit(job: Job, loop: Loop) -> None:
    """Train to the end, or to the end of the step in which a signal arrived, and wait for the last save."""
    if job.resume_from:
        loop.progress.updates = updates_in(job.resume_from)
        restore_weights(loop.step.model, job.resume_from)
        if loop.is_over:
            job.listener.note(
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
    job.run.event("largest_batch_fits", step=loop.progress.step, seconds=seconds, memory=peaks)
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


def _note_other_schedule(job: Job, loop: Loop, resume_from: Path) -> None:
    """Record that the number of steps has changed since the checkpoint, and the learning rate with it."""
    training, now, then = job.config.training, loop.progress.total, read_progress(resume_from).total
    done = loop.schedule.last_epoch
    if not done or then == now:
        return
    before, after = schedules.rate(training, done, then), schedules.rate(training, done + 1, now)
    warmup = schedules.warmup_steps(training, now)
    rises = f"rises until step {warmup} (`training.warmup`), " if done + 1 < warmup else ""
    job.run.event("schedule_changed", step=done, steps=[then, now], learning_rate=[before, after])
    job.listener.note(
        f"the schedule now ends at step {now}, not {then}: the learning rate goes from {before:.2e} at step "
        f"{done} to {after:.2e} at the next, {rises}"
        f"then follows `training.schedule: {training.schedule}`"
    )


# -- what is published -------------------------------------------------------------------------------------------------


def _load_best(job: Job, best: Path | None) -> None:
    if best:
        restore_weights(job.model, best)
        job.run.event("best_loaded", step=checkpoint_step(best))


def _best_checkpoint(job: Job, progress: Progress) -> Path | None:
    """The checkpoint of the best evaluation, if it is to be published; None if it is the last step or not on disk."""
    best, run = progress.best_step, job.run
    if not job.config.output.best or not best or best == progress.step:
        return None
    if not job.data.judges:
        job.listener.note(
            f"publishing the last step, not step {best} with its lower eval loss: that of fewer than {ROWS_TO_JUDGE} "
            "different rows says too little of the adapter"
        )
        return None
    path = run.checkpoint(best)
    if not path.is_dir():
        return None
    if problems := problems_of(path):
        run.event("best_damaged", step=best, problems=problems)
        job.listener.note(f"the best checkpoint {path} cannot be used ({'; '.join(problems)}); exporting the last step")
        return None
    return path


def _keep_initial_adapter(job: Job) -> Path | None:
    """PiSSA moves part of the base into the adapter. Keep the initial adapter, to publish one for the plain base."""
    if job.config.adapter.init != "pissa":
        return None
    folder = job.run.path / "adapter_initial"
    with staged(folder) as partial:
        save_weights(job.model, partial)
    return folder


def _publish(job: Job, initial: Path | None, whole: dict[str, torch.Tensor] | None) -> None:
    """Write the trained weights where other tools look for them, as an atomically published directory.

    `whole` are those of a sharded model.
    """
    target = job.run.adapter
    if job.config.adapter.kind == "none":
        target = job.run.merged
        job.model.config.use_cache = True  # off for training, but needed for generation
    try:
        with while_writing(target), staged(target) as folder:
            if target == job.run.adapter:
                _write_adapter(job, initial, whole, folder)
            else:
                save_weights(job.model, folder, whole)
                if job.model.can_generate():
                    chat_template.write_generation_config(job.model.generation_config, job.tokenizer, folder)
            fingerprint.save(job.tokenizer, job.provenance["base"], folder)
    except (OSError, SafetensorError) as error:  # safetensors 0.8 raises its own error for a full disk
        raise MachineError(not_written(target, error)) from None
    if initial:
        shutil.rmtree(initial)


def _write_adapter(job: Job, initial: Path | None, whole: dict[str, torch.Tensor] | None, folder: Path) -> None:
    """Write the adapter of the plain base, and prove that it is the trained one to PEFT."""
    model, section = job.model, job.config.adapter
    tensors, settings = adapter_files.weights(model, whole), plain_peft.settings(model)
    if initial:
        first = load_file(initial / adapter_files.WEIGHTS)
        tensors, settings = published.for_plain_base(tensors, first, settings, section)
    published.write(tensors, settings, folder)
    published.prove(build.weightless(job.config.model, job.architecture), folder, tensors, adapter_files.scales(model))
