"""Learning-rate schedules. A new one is one entry in SCHEDULES.

The learning rate of step i of n (from 1), w of which are warm-up, is the peak times

    i / w                          for i <= w: 1/w at the first step, 1 at step w
    curve(i - 1 - w, n - w, w)     after that: 1 at the first step, and not yet 0 at the last one (i = n)

so every step trains. After warm-up the curves are those of transformers 5.24 (`transformers.optimization`), whose own
warm-up starts at 0 and so wastes the first step. A skipped update does not count as a step here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.config import TrainingSection

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class Schedule:
    """A curve from 1 towards 0 as a function of (steps since warm-up, steps after warm-up, warm-up steps).

    Where the curve is 0, the learning rate is `end` (at most the peak) plus `end_share` of the peak.
    """

    help: str
    curve: Callable[[int, int, int], float]
    end: float = 0.0
    end_share: float = 0.0


def _cosine(since: int, steps: int, warmup: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * since / steps))


def _linear(since: int, steps: int, warmup: int) -> float:
    return 1 - since / steps


SCHEDULES: dict[str, Schedule] = {
    "cosine": Schedule("half a cosine down to 0", _cosine),
    "cosine_to_tenth": Schedule("half a cosine down to a tenth", _cosine, end_share=0.1),
    "linear": Schedule("straight down to 0", _linear),
    "constant": Schedule("level after warm-up", lambda since, steps, warmup: 1.0),
    "inverse_sqrt": Schedule(
        "with one over the square root of the step",
        lambda since, steps, warmup: 1 / math.sqrt(1 + since / (warmup or 10_000)),
    ),
    "polynomial": Schedule("straight down to 1e-7", _linear, end=1e-7),
}


def warmup_steps(training: TrainingSection, steps: int) -> int:
    """Number of warm-up steps out of `steps`; a fraction is rounded up."""
    return int(training.warmup) if training.warmup >= 1 else math.ceil(training.warmup * steps)


def rate(training: TrainingSection, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 1) of `steps`."""
    return training.rate * _factor(training, step, steps)


def scheduler(training: TrainingSection, optimizer: Optimizer, steps: int) -> LambdaLR:
    """The schedule of a job of `steps` as a torch scheduler, which counts completed updates from 0."""
    from torch.optim.lr_scheduler import LambdaLR  # here, since checking a config imports this module

    return LambdaLR(optimizer, lambda done: _factor(training, done + 1, steps))


def _factor(training: TrainingSection, step: int, steps: int) -> float:
    schedule, warmup = SCHEDULES[training.schedule], warmup_steps(training, steps)
    if step <= warmup:
        return step / warmup
    after = max(1, steps - warmup)
    end = schedule.end_share + min(1.0, schedule.end / training.rate)
    # torch's scheduler also asks for the rate after the last step, which is never used.
    return end + (1 - end) * schedule.curve(min(step - 1 - warmup, after), after, warmup)
