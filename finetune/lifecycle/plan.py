"""Before weights are loaded: chooses the settings that are `auto`, and forecasts the memory of a step."""

from __future__ import annotations

from typing import Any

import torch

from finetune.config import Config
from finetune.data.prepare import Prepared
from finetune.errors import ForecastError, OutOfMemoryError
from finetune.export import publish
from finetune.forecast import devices
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.levers import Lever
from finetune.forecast.plan import Fitted
from finetune.lifecycle import provenance, resume
from finetune.model.source.locate import at_hand
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report import words
from finetune.report.forecast_view import ChosenView
from finetune.report.terminal import Terminal
from finetune.resolve.planning import Planner
from finetune.runtime import ranks
from finetune.runtime.stages import stage
from finetune.storage.rundir import RunDirectory
from finetune.training import reference_scores
from finetune.training.checks import check
from finetune.training.oom_retry import named


def check_served(planner: Planner) -> None:
    """Raise ConfigError, as training does, if what a job trains could not be exported as `output.serve` says.

    That is known where the base's files and the rows are on this machine.
    """
    job = planner.job
    if planner.data and at_hand(job.model.name):
        run, tokenizer = RunDirectory(job.output.dir or "runs/unnamed"), load_tokenizer(job.model, job.data)
        publish.check_served(run, job, tokenizer, planner.data.kind)


def plan(
    config: Config, architecture: Any, data: Prepared, device: torch.device, terminal: Terminal,
    earlier: RunDirectory | None, kernels_off: frozenset[str],
) -> tuple[Config, Forecast | None]:  # fmt: skip
    """The config with its `auto` settings fitted to the device, and the forecast of its step; the same on all ranks.

    `earlier` is the run if there was an earlier start, which may have recorded smaller micro-batches; `kernels_off` are
    the fused kernels that it does without. A job that does not fit is refused with the levers that would help.
    """

    def of_first_rank() -> tuple[Config, Forecast | None]:
        if config.memory.check != "off" or not config.fitted:
            stage("forecasting the memory of a training step")
        card = devices.here(device, config.memory).without(kernels_off)
        planner = Planner(reference_scores.decided(config, data), architecture, card, data, ranks.world_size())
        resolved, fitted = _resolved(planner, terminal)
        if earlier and (lowered := resume.lowered(resolved, earlier)):
            terminal.note(f"{named(lowered)}: in an earlier start of this run, memory ran out with more")
            resolved, fitted = resolved.changed(lowered), None
        check(resolved, device)  # again, with the micro-batch that was chosen
        return resolved, _forecast(planner, resolved, fitted, terminal)

    planned, forecast = ranks.main_does(of_first_rank)
    return provenance.with_local_paths(planned, config), forecast


def _resolved(planner: Planner, terminal: Terminal) -> tuple[Config, Fitted | None]:
    job = planner.job
    # Only the micro-batch cannot do without a forecast.
    unseen = job.changed({"memory.checkpointing": "all"}) if job.memory.checkpointing == "auto" else job
    if job.memory.check == "off" and unseen.fitted:
        return unseen, None
    try:
        config, fitted = planner.resolve()
    except ForecastError:
        if job.memory.check == "refuse" or not unseen.fitted:
            raise
        return unseen, None
    if fitted:
        terminal.show(ChosenView(fitted))
    return config, fitted


def _forecast(planner: Planner, config: Config, fitted: Fitted | None, terminal: Terminal) -> Forecast | None:
    refuses = config.memory.check == "refuse"
    if config.memory.check == "off":
        return None
    try:
        forecast = planner.with_reference(config, fitted.forecast if fitted else planner.forecast(config))
    except ForecastError as error:
        if refuses:
            raise
        terminal.note(f"training continues without a forecast: {error}")
        return None
    if not forecast.fits:
        message = does_not_fit(forecast, planner.levers(config, forecast))
        if refuses:
            raise OutOfMemoryError(f"{message}\nTo train anyway: memory.check=warn")
        terminal.note(message)
    return forecast


def does_not_fit(forecast: Forecast, levers: list[tuple[Lever, Forecast]]) -> str:
    """The message for a job that does not fit: by how much, with which batch, and what would help."""
    batch = forecast.batch
    lines = [
        f"the job does not fit {forecast.device.name}: it would take {words.size(forecast.needed_bytes)} of "
        f"{words.size(forecast.budget_bytes)}, at its largest batch ({words.batch(batch)}, from "
        f"{batch.source}). What would help:"
    ]
    for lever, after in levers:
        verdict = "fits" if after.fits else "does not fit yet"
        lines.append(f"  {lever}: {words.size(after.needed_bytes)}, {verdict} ({lever.cost})")
    return "\n".join(lines)
