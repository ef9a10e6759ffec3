"""Compare the forecast with the measurements, phase by phase, at the end of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from finetune.forecast.replay import Forecast
from finetune.measure.monitor import Peak

TOLD_ABOVE = 0.03
"""A larger difference, relative to what was measured, is shown to the user."""


@dataclass(frozen=True)
class Difference:
    """One phase: what was forecast and what was measured, in bytes."""

    phase: str
    measure: str
    forecast_bytes: int
    measured_bytes: int

    @property
    def label(self) -> str:
        """The phase, and of several measures which."""
        return self.phase if self.measure == "resident_bytes" else f"{self.phase}, {self.measure.split('_')[0]}"

    @property
    def relative(self) -> float:
        """Forecast over measured, less 1: below 0 it was too little."""
        return self.forecast_bytes / self.measured_bytes - 1

    @property
    def large(self) -> bool:
        return abs(self.relative) > TOLD_ABOVE


def compare(forecast: Forecast, peaks: dict[str, Peak]) -> list[Difference]:
    """The phases that were both forecast and measured.

    On CUDA allocated and reserved bytes are compared as the allocator counts them. On a CPU the resident size is
    measured, which also holds what libraries keep for themselves; it stands beside live tensors and what the process
    held before it began.
    """
    found = []
    for phase, predicted in forecast.phases.items():
        for measure, measured in peaks.get(phase, {}).items():
            if measure == "resident_bytes":
                expected = predicted["allocated_bytes"] + forecast.device.outside_bytes
                found.append(Difference(phase, measure, expected, measured))
            elif measure in predicted:
                found.append(Difference(phase, measure, predicted[measure], measured))
    return found


def as_dict(forecast: Forecast, peaks: dict[str, Peak]) -> dict[str, Any]:
    """The contents of forecast.json: the forecast and, once there is something, what was measured."""
    differences = [{**asdict(each), "relative": round(each.relative, 5)} for each in compare(forecast, peaks)]
    return {**forecast.as_dict(), "measured": peaks, "differences": differences}
