"""Learning-rate schedules. A new one is one entry in SCHEDULES.

The rate of step i of n (from 1), of which w are warm-up, is the peak times

    i / w                          for i <= w: 1/w of the peak at the first step, all of it at the last one
    curve(i - 1 - w, n - w, w)     after that: 1 at the first step, and not yet 0 at the last one (i = n)

so every step trains. After warm-up the curves are those of transformers 5.23 (`transformers.optimization`), whose own
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
    """A curve from 1 towards 0 over (steps since warm-up, steps after warm-up, warm-up steps), and the rate at its 0.

    That rate is `end`, no more than the peak, plus `end_share` of the peak.
    """

    help: str
    curve: Callable[[int, int, int], float]
    end: float = 0.0
    end_share: float = 0.0


def _cosine(since: int, steps: int, warmup: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * since / steps))


def _linear(since: int, steps: int, warmup: int) -> float:
    return 1 - since / steps


def _constant(since: int, steps: int, warmup: int) -> float:
    return 1.0


def _inverse_sqrt(since: int, steps: int, warmup: int) -> float:
    scale = warmup or 10_000
    return 1 / math.sqrt(1 + since / scale)


SCHEDULES: dict[str, Schedule] = {
    "cosine": Schedule("half a cosine down to 0", _cosine),
    "cosine_to_tenth": Schedule("half a cosine down to a tenth", _cosine, end_share=0.1),
    "linear": Schedule("straight down to 0", _linear),
    "constant": Schedule("level after warm-up", _constant),
    "inverse_sqrt": Schedule("with one over the square root of the step", _inverse_sqrt),
    "polynomial": Schedule("straight down to 1e-7", _linear, end=1e-7),
}


def warmup_steps(training: TrainingSection, steps: int) -> int:
    """Number of warm-up steps of `steps`: a share of them is rounded up."""
    return int(training.warmup) if training.warmup >= 1 else math.ceil(training.warmup * steps)


def rate(training: TrainingSection, step: int, steps: int) -> float:
    """The learning rate of a step, from 1, of `steps`."""
    return training.learning_rate * _factor(training, step, steps)


def scheduler(training: TrainingSection, optimizer: Optimizer, steps: int) -> LambdaLR:
    """The schedule of a job of `steps` as torch's scheduler, which counts the updates that are done, from 0."""
    from torch.optim.lr_scheduler import LambdaLR  # not for the table, by which a config is checked

    return LambdaLR(optimizer, lambda done: _factor(training, done + 1, steps))


def _factor(training: TrainingSection, step: int, steps: int) -> float:
    schedule, warmup = SCHEDULES[training.schedule], warmup_steps(training, steps)
    if step <= warmup:
        return step / warmup
    after = max(1, steps - warmup)
    end = schedule.end_share + min(1.0, schedule.end / training.learning_rate)
    # A scheduler asks for the rate of the step after the last one, too, which no step takes.
    return end + (1 - end) * schedule.curve(min(step - 1 - warmup, after), after, warmup)
