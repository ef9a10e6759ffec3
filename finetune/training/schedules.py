"""Learning-rate schedules. A new one is one entry in SCHEDULES."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """A schedule by its name in transformers, with its arguments."""

    help: str
    transformers_name: str
    arguments: dict[str, Any] = field(default_factory=dict)


SCHEDULES: dict[str, Schedule] = {
    "cosine": Schedule("half a cosine down to 0", "cosine"),
    "cosine_to_tenth": Schedule("half a cosine down to a tenth", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "linear": Schedule("straight down to 0", "linear"),
    "constant": Schedule("level after warm-up", "constant_with_warmup"),
    "inverse_sqrt": Schedule("with one over the square root of the step", "inverse_sqrt"),
    "polynomial": Schedule("a polynomial down to 1e-7", "polynomial"),
}
