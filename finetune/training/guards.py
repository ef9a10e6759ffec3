"""Guards against repeatedly skipped updates, loss spikes, and preferences that make the chosen answers less likely."""

from __future__ import annotations

import math
import statistics
from collections import deque

SKIPS_IN_A_ROW = 3
"""This many consecutive skipped updates end a run.

A skipped update changes no weight, so only other rows can give other numbers. One bad row makes one bad step; if three
batches without a common row are not finite, the weights are at fault, and no data will repair them.
"""


class Skips:
    """Counts skipped updates, and tells when there are too many."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self._faults = 0

    def see(self, skipped: bool, loss_scale: float | None) -> bool:
        """Record a step; return whether the run should end.

        With loss scaling (fp16) a skip halves the scale, which starts at 2^16 (arXiv 1710.03740, section 3.2), so it
        counts as a fault only once the scale is below 1, where scaling no longer prevents underflow. `loss_scale` is
        None without it, and where the loss itself is not finite, which no scale mends.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped
        self._faults = self._faults + 1 if skipped and loss_scale is None else 0
        return self._faults >= SKIPS_IN_A_ROW if loss_scale is None else skipped and loss_scale < 1


def remedy(updates: int, *, scaled: bool) -> str:
    """Advice on numbers that are not finite after `updates` updates; `scaled`: with loss scaling (fp16)."""
    if updates:
        return "Lower `training.learning_rate`" + (
            ", lengthen `training.warmup`, or use bf16 instead of fp16" if scaled else " or lengthen `training.warmup`"
        )
    cause = "No weight was updated yet, so the learning rate is not the cause. "
    if scaled:
        return cause + (
            "Use bf16 or fp32 instead of fp16, or raise `training.max_steps`: each skip halves the loss scale, which "
            "starts at 65,536"
        )
    return cause + "See whether `training.precision: fp32` is finite; if not, the base or the rows are at fault"


class Spikes:
    """Detects a loss far above the previous ones.

    The bound is the median of the recent losses plus six standard deviations, estimated by the median absolute
    deviation, which the spikes themselves hardly affect (Leys et al. 2013, "Detecting outliers", J. Exp. Soc. Psychol.
    49, use three; a run has thousands of steps of uneven difficulty, and alarms should be rare). A rise of less than a
    tenth of a nat is never a spike.
    """

    WINDOW, AT_LEAST = 50, 20
    DEVIATIONS, GRAIN_NATS = 6, 0.1
    _NORMAL = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.WINDOW)
        self._above = False

    def see(self, loss: float | None) -> float | None:
        """Record a loss; return the median of the previous ones if this is the first step of a spike, else None."""
        if loss is None or not math.isfinite(loss):
            return None
        before, was_above, self._above = list(self._losses), self._above, False
        self._losses.append(loss)
        if len(before) < self.AT_LEAST:
            return None
        median = statistics.median(before)
        deviation = self._NORMAL * statistics.median(abs(one - median) for one in before)
        self._above = loss > median + max(self.DEVIATIONS * deviation, self.GRAIN_NATS)
        return median if self._above and not was_above else None


class Falls:
    """Detects that chosen answers have become less likely than under the reference while the margin is positive.

    The margin then comes from the rejected answers alone, which have fallen further (seen in arXiv 2402.13228 and
    2404.19733, which adds the cross-entropy). Over the last WINDOW steps the mean reward of the chosen answers must be
    below 0, where training starts, and the mean margin above it, each by ERRORS standard errors.
    """

    WINDOW, ERRORS = 20, 3

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=self.WINDOW)
        self._seen = False

    def see(self, chosen: float | None, margin: float | None) -> tuple[float, float] | None:
        """Record the rewards of a step; return both means when they first say so, else None."""
        if self._seen or chosen is None or margin is None:
            return None
        self._steps.append((chosen, margin))
        if len(self._steps) < self.WINDOW:
            return None
        (fallen, fallen_by), (grown, grown_by) = (
            (statistics.fmean(values), self.ERRORS * statistics.stdev(values) / math.sqrt(self.WINDOW))
            for values in zip(*self._steps, strict=True)
        )
        self._seen = fallen < -fallen_by and grown > grown_by
        return (fallen, grown) if self._seen else None
