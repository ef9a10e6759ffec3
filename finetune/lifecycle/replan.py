"""The plan made again where the model itself rules out kernels."""

from __future__ import annotations

from dataclasses import replace

from finetune.lifecycle import opening
from finetune.model.recompute import checkpointing
from finetune.report.terminal import Terminal
from finetune.resolve import Job, resolve
from finetune.runtime import ranks
from finetune.training.job import TrainingJob


def without_ruled_out(
    training: TrainingJob, job: Job, prepared: Job, terminal: Terminal
) -> tuple[TrainingJob, Job]:  # fmt: skip
    """A completed job, made again if its model rules out kernels that were not off before.

    `prepared` is the job before its memory was fitted, whose `auto` settings may get other values. The run remembers
    the kernels, so that its next start plans without them at once. Raises as `resolve` does.
    """
    ruled_out = sorted(training.kernels_off - job.kernels_off)
    if not ruled_out:
        return training, job
    terminal.note("planning again, without what is off")
    run, model = training.run, training.model
    job = resolve(replace(prepared, kernels_off=training.kernels_off), earlier=run, until="memory")
    layers = checkpointing.layers(model)
    checkpointing.apply(model, job.config.memory, training.device.type)
    checkpointing.choose(model, checkpointing.pattern(job.config.memory.checkpointing, len(layers)))
    if ranks.is_main():
        run.event("kernels_ruled_out", kernels=ruled_out)
        opening.write_plan(job.config, run, job.forecast)
    by_length = job.forecast.by_length if job.forecast else ()
    provenance = {**training.provenance, "config": job.config.model_dump(mode="json")}
    return replace(training, config=job.config, by_length=by_length, provenance=provenance), job
