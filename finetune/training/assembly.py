"""Puts together the loop of a job: its step, data, schedule, checkpoints, evaluation and retries."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from finetune import objectives
from finetune.data.batching import RowOrder, Sizes
from finetune.model.precision import autocast
from finetune.model.probes import causality
from finetune.model.recompute.checkpointing import ByLength
from finetune.model.source import identity
from finetune.runtime import driver, libraries, memory_snapshots, ranks
from finetune.runtime.device import require_default_stream
from finetune.training import optimizers, probe_table, schedules, strategies
from finetune.training.batches import PreparedRows, StepSource
from finetune.training.checkpoints import Checkpoints
from finetune.training.collator import StepCollator, cannot_share, micro_batching
from finetune.training.eval_loss import EvalLoss
from finetune.training.guards import Falls
from finetune.training.job import TrainingJob
from finetune.training.loop import Intervals, Loop
from finetune.training.noise import Noise
from finetune.training.oom_report import InEvaluation, OutOfMemoryReport
from finetune.training.oom_retry import Retry
from finetune.training.probe_table import Subject
from finetune.training.progress import Progress, read_progress
from finetune.training.recorder import MetricsRecorder
from finetune.training.step import Step


def assemble(job: TrainingJob, steps: StepSource | None = None) -> Loop:
    """The loop of a job whose model is complete, on `steps`, by default of its prepared rows."""
    config, training, run = job.config, job.config.training, job.outlets.run
    profiler = memory_snapshots.profiler(config.memory.profile_steps, run.profile, job.process.device)
    objective = objectives.of(config)
    falls = Falls() if objective.reference and "nll_weight" in objective.keys.read else None
    recorder = MetricsRecorder(job.outlets, job.process.monitor, profiler, falls)
    collate = collator(job)
    step = _step(job, recorder, collate)
    steps = steps or prepared_rows(job, collate)
    progress = read_progress(job.resume_from) if job.resume_from else Progress()
    progress.total = training.max_steps or math.ceil(training.epochs * steps.in_epoch)
    schedule = schedules.scheduler(training, step.engine.optimizer, progress.total)
    checkpoints = Checkpoints(
        step, schedule, run, keep=config.output.keep, provenance=job.provenance,
        verified={job.resume_from} if job.resume_from else set(), saved=job.outlets.callbacks.saved,
        check_base_files=identity.Mapped(config.model).check if job.process.device.type == "cpu" else lambda: None,
    )  # fmt: skip
    report = OutOfMemoryReport(config, run, job.outlets.listener, progress, checkpoints, job.data, job.process.device)
    evaluation = None
    if job.data.eval is not None:
        evaluation = EvalLoss(step, job.data.eval, collate, training.batch_size, InEvaluation(report))
    return Loop(
        step=step,
        schedule=schedule,
        steps=steps,
        progress=progress,
        intervals=Intervals(
            evaluate_every=training.eval_every,
            save_every=config.output.save_every,
            save_best=config.output.best and job.data.judges,
            patience=training.early_stopping,
        ),
        retry=Retry(report),
        recorder=recorder,
        checkpoints=checkpoints,
        evaluation=evaluation,
        signals=job.process.signals,
    )


def _step(job: TrainingJob, recorder: MetricsRecorder, collate: StepCollator) -> Step:
    model, device, config, training = job.model, job.process.device, job.config, job.config.training
    updated_on = next(weight.device.type for weight in model.parameters() if weight.requires_grad)
    managed = updated_on == "cuda" and driver.shares_managed_memory(torch.cuda.current_device())
    name, replaced = optimizers.choose(config.optimizer, updated_on, managed_memory=managed)
    if replaced:
        job.outlets.listener.note(replaced)
    optimizer = optimizers.make(name, config.optimizer, training.rate, model)
    require_default_stream(device)
    scaler = torch.amp.GradScaler(device.type) if training.precision == "fp16" else None
    return Step(
        engine=strategies.engine(
            strategies.Given(model, optimizer, scaler, config.distributed, training.max_grad_norm, device)
        ),
        objective=objectives.of(config),
        precision=training.precision,
        max_grad_norm=training.max_grad_norm,
        masked=causality.needs_mask(model.config, training.precision, causality.capability_of(device)),
        device=device,
        monitor=job.process.monitor,
        context=config.distributed.context,
        noise=Noise(model, alpha, training.seed) if (alpha := training.neftune_noise_alpha) else None,
        levels=ByLength(model, config.memory.checkpointing, job.by_length) if job.by_length else None,
        idle=collate.idle(),
        seen=recorder.saw,
    )


def collator(job: TrainingJob) -> StepCollator:
    """Collates the steps of a job, alike on all ranks; notes why packed segments cannot share tokens, if so."""
    config = job.config
    way = micro_batching(config, job.architecture)
    if way.shares:
        with autocast(config.training.precision, job.process.device), libraries.without_cudnn_attention():
            unlike = [failure.line for failure in probe_table.run("sharing", Subject(config, job.model))]
        for line in unlike:
            job.outlets.listener.note(line)
        # Ranks that divide a step differently would wait for each other's passes for ever.
        way = replace(way, shares=not any(ranks.gathered(unlike)))
    elif way.packed and way.layout.sequences > 1:
        why = cannot_share(config.training, config.kernels, config.model.attention, job.architecture)
        job.outlets.listener.note(f"a prompt is computed once for each answer, not for both: {why}")
    return StepCollator(
        way, job.tokenizer.pad_token_id, ranks.rank(), ranks.world_size(), config.distributed.context,
        job.data.media,
    )  # fmt: skip


def prepared_rows(job: TrainingJob, collate: StepCollator) -> PreparedRows:
    """The source of steps of a job's own rows."""
    training, rows = job.config.training, job.data.train
    # The order of a run must outlive a change of what lets segments share tokens, such as `kernels.compile`.
    sizes = Sizes.of(rows, replace(collate.way, shares=False))
    order = RowOrder(sizes.lengths, training.batch_size, training.seed, training.group_by_length, sizes.areas)
    return PreparedRows(rows, order, collate, training.batch_size, on_card=job.process.device.type == "cuda")
