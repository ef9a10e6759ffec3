"""Guards on the numbers of a step: skipped updates, too many of them in a row, and loss spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque

SKIPS_IN_A_ROW = 3
"""So many updates left out one after the other end a run.

A skipped update changes no weight, so that only other rows can bring other numbers. One bad row makes one bad step;
when three batches without a row in common are not finite, the fault lies with the weights, which no rows will cure.
"""


class Skips:
    """Counts the updates that were left out, and says when they are too many."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def see(self, skipped: bool, loss_scale: float | None) -> bool:
        """Whether the fault is there to stay.

        With loss scaling (fp16) a skipped update is how the scale finds its height, halved each time from 2^16
        (arXiv 1710.03740, section 3.2): there it is one once the scale is below 1, where it no longer makes any
        number larger than it is without.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped
        return self.in_a_row >= SKIPS_IN_A_ROW if loss_scale is None else skipped and loss_scale < 1


class Spikes:
    """Tells a loss that is far above those before it.

    The bound is the median of the last losses and six of their deviations from it, as the median of the absolute
    deviations has them, which the spikes themselves hardly move (Leys et al. 2013, "Detecting outliers", J. Exp. Soc.
    Psychol. 49: there three suffice; a run has thousands of steps of uneven difficulty, and is to be called seldom).
    A smaller rise than a tenth of a nat is none, however even the losses were.
    """

    WINDOW, AT_LEAST = 50, 20
    DEVIATIONS, GRAIN_NATS = 6, 0.1
    _NORMAL = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.WINDOW)
        self._above = False

    def see(self, loss: float | None) -> float | None:
        """The median of the losses before, if `loss` is a spike over them and the one before was none; else None."""
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
