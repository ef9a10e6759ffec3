"""Guards against repeatedly skipped updates and loss spikes."""

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

    def see(self, skipped: bool, loss_scale: float | None) -> bool:
        """Record a step; return whether the run should end.

        With loss scaling (fp16) a skip halves the scale, which starts at 2^16 (arXiv 1710.03740, section 3.2), so it
        counts as a fault only once the scale is below 1, where scaling no longer prevents underflow.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped
        return self.in_a_row >= SKIPS_IN_A_ROW if loss_scale is None else skipped and loss_scale < 1


def remedy(updates: int, *, scaled: bool) -> str:
    """What to do about numbers that are not finite after `updates` updates; `scaled`: with loss scaling (fp16)."""
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
