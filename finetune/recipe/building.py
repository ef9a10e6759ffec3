"""Builds what is trained: the base, which is asked a few questions, the adapter on it, and its kernels."""

from __future__ import annotations

from dataclasses import replace

from finetune.forecast import measured
from finetune.model import build
from finetune.model.adapters import adapter
from finetune.model.build import LoadBase
from finetune.model.recompute import checkpointing
from finetune.objectives import layout_of
from finetune.recipe import opening, resume
from finetune.recipe.inputs import JobInputs
from finetune.recipe.opening import Opened
from finetune.recipe.start import Session
from finetune.resolve import Job, resolve
from finetune.runtime import ranks
from finetune.runtime.memory_monitor import Monitor
from finetune.training import learning_rate, model_setup, strategies
from finetune.training.callbacks import Callback, Callbacks
from finetune.training.job import Process, TrainingJob
from finetune.training.recorder import Outlets
from finetune.training.sample_answers import SampleAnswers
from finetune.training.tracking import Trackers


def load_and_adapt(
    job: Job, inputs: JobInputs, opened: Opened, session: Session, monitor: Monitor, trackers: Trackers,
    callbacks: tuple[Callback, ...], load_base: LoadBase,
) -> tuple[TrainingJob, SampleAnswers]:  # fmt: skip
    """Load the base, let it answer a few questions, and put the adapter on it; the job to be trained and the answers.

    Raises as `confirm_base` if the base is not the one that the run was started with.
    """
    config, device, terminal, start = job.config, session.device, session.terminal, opened.start
    placement = strategies.placement(config.distributed, device)
    with monitor.phase("load"):
        base = load_base(inputs.blueprint, device, placement)
    monitor.include(base)
    provenance = opening.confirm_base(job, opened, inputs, base)
    monitor.take_step()  # loading is reported once, not with the first step
    answers = SampleAnswers(inputs.tokenizer, config, opened.run)
    answers.before(base, terminal.note)
    model = build.trainable(
        base, config.model, resume.to_build(config.adapter, resumed=bool(start.checkpoint)), config.memory,
        seed=config.training.seed, device_type=device.type, placement=placement,
    )  # fmt: skip
    capacity = learning_rate.capacity(config.adapter, model, inputs.data.train_counts, layout_of(config))
    terminal.built(model, adapter.left_out(base, config.adapter), capacity)
    return TrainingJob(
        config, inputs.blueprint.architecture, model, inputs.tokenizer, inputs.data,
        process=Process(device, monitor, session.signals),
        outlets=Outlets(opened.run, terminal, trackers, Callbacks(callbacks if ranks.is_main() else ())),
        provenance=provenance, resume_from=start.checkpoint,
        by_length=job.forecast.by_length if job.forecast else (), kernels_off=job.kernels_off,
    ), answers  # fmt: skip


def complete(training_job: TrainingJob, job: Job, with_rows: Job, session: Session) -> tuple[TrainingJob, Job]:
    """The job to be trained, with its kernels; planned again if its model rules out some that were not off before.

    `with_rows` is the job before its memory was fitted, whose `auto` settings may get other values. The run remembers
    the kernels, so that its next start plans without them at once. Raises as `resolve` does.
    """
    training_job = model_setup.complete(training_job)
    measured.context(session.device, session.terminal.note)  # now that the kernels of a step are loaded
    ruled_out = sorted(training_job.kernels_off - job.kernels_off)
    if not ruled_out:
        return training_job, job
    session.terminal.note("planning again, without what is off")
    run, model = training_job.outlets.run, training_job.model
    job = resolve(replace(with_rows, kernels_off=training_job.kernels_off), earlier=run, until="memory")
    layers = checkpointing.layers(model)
    checkpointing.apply(model, job.config.memory, training_job.process.device.type)
    checkpointing.choose(model, checkpointing.pattern(job.config.memory.checkpointing, len(layers)))
    if ranks.is_main():
        run.event("kernels_ruled_out", kernels=ruled_out)
        opening.write_plan(job, run)
    by_length = job.forecast.by_length if job.forecast else ()
    provenance = {**training_job.provenance, "config": job.config.model_dump(mode="json")}
    return replace(training_job, config=job.config, by_length=by_length, provenance=provenance), job
