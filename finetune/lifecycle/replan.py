"""The fused kernels that a start does without, and the plan made again where the model itself rules out more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from finetune.config import Config
from finetune.forecast.job_forecast import Forecast
from finetune.lifecycle import opening
from finetune.lifecycle.plan import plan
from finetune.model.probes import marker
from finetune.model.recompute import checkpointing
from finetune.report.terminal import Terminal
from finetune.runtime import ranks
from finetune.storage.rundir import RunDirectory
from finetune.training import probe_table
from finetune.training.job import TrainingJob


def left_out(
    config: Config, run: RunDirectory, device: torch.device, note: Callable[[str], None], *, fresh: bool
) -> frozenset[str]:  # fmt: skip
    """The fused kernels, or `loss`, that a start does without, and notes on them; the same on all ranks.

    An earlier process ended on one of the ranks' devices while they were tried, or an earlier start of this run found
    them unlike the plain path. Raises MachineError if `config` asks for something else that a process ended in.
    """
    ended = frozenset().union(*ranks.gathered(marker.ended(device)))
    if line := probe_table.left_out(config, ended):
        note(line)
    events = ranks.main_does(
        lambda: [] if fresh else [one for one in run.events() if one["event"] == "kernels_ruled_out"]
    )
    ruled_out = {kernel for event in events for kernel in event["kernels"]} - probe_table.kernels_off(ended)
    if ruled_out:
        names = "`, `".join(sorted(ruled_out))
        note(f"kernels: `{names}` is off: an earlier start of this run found it unlike the plain path")
    return probe_table.kernels_off(ended) | ruled_out


def without_ruled_out(
    job: TrainingJob, asked: Config, off: frozenset[str], forecast: Forecast | None, terminal: Terminal
) -> tuple[TrainingJob, Forecast | None]:  # fmt: skip
    """A completed job and its forecast, made again if its model rules out kernels that were not `off` before.

    `asked` is the config before the plan, whose `auto` settings may get other values. The run remembers the kernels, so
    that its next start plans without them at once. Raises as `plan` does.
    """
    ruled_out = sorted(job.kernels_off - off)
    if not ruled_out:
        return job, forecast
    terminal.note("planning again, without what is off")
    run = job.run
    config, forecast = plan(asked, job.architecture, job.data, job.device, terminal, run, job.kernels_off)
    layers = checkpointing.layers(job.model)
    checkpointing.apply(job.model, config.memory, job.device.type)
    checkpointing.choose(job.model, checkpointing.pattern(config.memory.checkpointing, len(layers)))
    if ranks.is_main():
        run.event("kernels_ruled_out", kernels=ruled_out)
        opening.write_plan(config, run, forecast)
    by_length = forecast.by_length if forecast else ()
    provenance = {**job.provenance, "config": config.model_dump(mode="json")}
    return replace(job, config=config, by_length=by_length, provenance=provenance), forecast
