"""Records the end of training: its peak memory by phase, and the forecast beside it."""

from __future__ import annotations

from typing import Any

from finetune.forecast.job_forecast import Forecast
from finetune.measure.monitor import Peak
from finetune.report.terminal import Terminal
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory


def record(
    run: RunDirectory, forecast: Forecast | None, peaks: dict[str, Peak], terminal: Terminal, **facts: Any
) -> None:
    """Record the end of training, with `facts` and peak memory by phase, and compare the forecast with the peaks."""
    terminal.answers(run)
    run.event("trained", **facts, memory=peaks)
    if forecast:
        write_json(run.forecast_file, forecast.beside(peaks))
        terminal.compared(forecast.differences(peaks), forecast.needed_bytes, peaks)
