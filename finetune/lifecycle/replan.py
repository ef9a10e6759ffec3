"""A plan made again before the first step, where the model itself rules out fused kernels that the plan counted on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from finetune.certificate.verdict import Certificate
from finetune.config import Config
from finetune.forecast.job_forecast import Forecast
from finetune.lifecycle import opening
from finetune.lifecycle.plan import plan
from finetune.lifecycle.preparation import JobInputs
from finetune.model.recompute import checkpointing
from finetune.report.terminal import Terminal
from finetune.runtime import ranks
from finetune.storage.rundir import RunDirectory
from finetune.training.job import TrainingJob


def remembered(
    certificate: Certificate, run: RunDirectory, note: Callable[[str], None], *, fresh: bool
) -> Certificate:  # fmt: skip
    """`certificate` without the kernels that this run's model ruled out in an earlier start; the same on all ranks."""
    events = ranks.main_does(
        lambda: [] if fresh else [one for one in run.events() if one["event"] == "kernels_ruled_out"]
    )
    off = sorted({kernel for event in events for kernel in event["kernels"]} - certificate.kernels_off)
    if off:
        note(f"kernels: `{'`, `'.join(off)}` is off: an earlier start of this run found it unlike the plain path")
    return certificate.without(off)


def without_ruled_out(
    job: TrainingJob, asked: Config, inputs: JobInputs, certificate: Certificate, forecast: Forecast | None,
    terminal: Terminal,
) -> tuple[TrainingJob, Forecast | None]:  # fmt: skip
    """A completed job and its forecast, made again if its model rules out kernels that `certificate` does not.

    `asked` is the config before the plan, whose `auto` settings may get other values. The run remembers the kernels, so
    that its next start plans without them at once. Raises as `plan` does.
    """
    ruled_out = sorted(job.kernels_off - certificate.kernels_off)
    if not ruled_out:
        return job, forecast
    terminal.note("planning again, without what is off")
    run = job.run
    config, forecast = plan(
        asked, job.architecture, job.data, job.device, terminal, run, certificate.without(ruled_out)
    )
    layers = checkpointing.layers(job.model)
    checkpointing.apply(job.model, config.memory, job.device.type)
    checkpointing.choose(job.model, checkpointing.pattern(config.memory.checkpointing, len(layers)))
    if ranks.is_main():
        run.event("kernels_ruled_out", kernels=ruled_out)
        opening.write_plan(config, run, inputs, forecast)
    by_length = forecast.by_length if forecast else ()
    provenance = {**job.provenance, "config": opening.asked_config(config, inputs).model_dump(mode="json")}
    return replace(job, config=config, by_length=by_length, provenance=provenance), forecast
