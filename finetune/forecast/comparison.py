"""Compare the forecast with the measurements, phase by phase, at the end of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from finetune.forecast.replay import Forecast
from finetune.measure.monitor import Peak
from finetune.storage.records import Difference


def compare(forecast: Forecast, peaks: dict[str, Peak]) -> list[Difference]:
    """The phases that were both forecast and measured, in the same measure.

    On CUDA these are allocated and reserved bytes as the allocator counts them. On a CPU it is the bytes of tensors,
    where they were counted (`finetune.measure.tensors`), and not the resident size, which also holds what libraries
    keep for themselves.
    """
    return [
        Difference(phase, measure, predicted[measure], measured)
        for phase, predicted in forecast.phases.items()
        for measure, measured in peaks.get(phase, {}).items()
        if measure in predicted
    ]


def as_dict(forecast: Forecast, peaks: dict[str, Peak]) -> dict[str, Any]:
    """The contents of forecast.json: the forecast and, once there is something, what was measured."""
    differences = [{**asdict(each), "relative": round(each.relative, 5)} for each in compare(forecast, peaks)]
    return {**forecast.as_dict(), "measured": peaks, "differences": differences}
