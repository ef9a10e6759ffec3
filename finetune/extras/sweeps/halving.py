"""Successive halving (arXiv 1502.07943): half of the settings are stopped early, where their losses tell them apart.

A setting's score is each evaluation row's (sum of losses, trained tokens) by each seed: float64 (seeds, rows, 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from finetune.evaluation.intervals import Measured, compared, half_width

SettingScores = Mapping[str, np.ndarray]

LEAST_ROWS = 6
"""The fewest rows that can tell two settings apart with 95% confidence: by the sign test, five that all speak for one
are chance in 2 of 2**5 cases, more than one in twenty, and a bootstrap over so few rows is too narrow to say so.
"""


def shares(settings: int) -> list[float]:
    """The shares of a whole run after which half of this many settings are stopped: 1/8, 1/4 and 1/2 for 8 settings.

    Two are never halved, so that the winner was compared with another setting over whole runs.
    """
    halvings = int(math.log2(settings)) if settings > 2 else 0
    return [2.0 ** (number - halvings) for number in range(halvings)]


def finite(scores: SettingScores) -> dict[str, np.ndarray]:
    """The scores of settings that did not diverge."""
    return {name: score for name, score in scores.items() if np.isfinite(score).all()}


def loss(score: np.ndarray) -> float:
    """Nats per trained token, of a score or of one seed's (rows, 2)."""
    total, count = score.reshape(-1, 2).sum(axis=0)
    return float(total / count)


def are_enough(score: np.ndarray) -> bool:
    """Whether a score has rows enough to tell two settings apart."""
    return score.shape[1] >= LEAST_ROWS


def ranked(scores: SettingScores) -> list[str]:
    """The settings, the best first, those that diverged last; equal ones in the order given."""
    known = finite(scores)
    return sorted(scores, key=lambda name: loss(scores[name]) if name in known else math.inf)


def differences(scores: SettingScores, other: str) -> dict[str, dict[str, float | None]]:
    """By setting, its loss less that of `other` with a 95% confidence interval, paired by rows and by seeds.

    The half-widths of both are added in quadrature, since rows and seeds are drawn independently. With one seed, what
    another one would change is not in the interval. Fewer than LEAST_ROWS rows have none.
    """
    names = (other, *(name for name in scores if name != other))
    rows = {name: scores[name].sum(axis=0) if are_enough(scores[name]) else None for name in names}
    figures = compared({name: Measured(loss(scores[name]), rows[name]) for name in names})
    results = {name: figures[name]["difference"] for name in names[1:]}
    for name, difference in results.items():
        value, low, high = (difference[bound] for bound in ("value", "low", "high"))
        if len(scores[name]) < 2 or value is None or low is None or high is None:
            continue
        by_seed = [loss(one) - loss(another) for one, another in zip(scores[name], scores[other], strict=True)]
        below, above = (math.hypot(bound - value, half_width(by_seed)) for bound in (low, high))
        results[name] = {"value": value, "low": value - below, "high": value + above}
    return results


def stopped(scores: SettingScores) -> dict[str, str]:
    """The settings to stop, with the reason: those of the worse half whose loss is certain to be above that of the last
    of the better half, by these rows and seeds. Of two settings none is stopped, as in `shares`. Scores are finite.
    """
    order = ranked(scores)
    if len(order) <= 2:
        return {}
    kept = order[: math.ceil(len(order) / 2)]
    last = kept[-1]
    apart = differences(scores, last)
    return {
        name: f"its loss is {apart[name]['value']:.4f} above that of {last}"
        for name in order[len(kept) :]
        if (apart[name]["low"] or 0.0) > 0
    }


def tied(scores: SettingScores) -> list[str]:
    """The best setting, and those that cannot be told apart from it on these rows and seeds; empty if all diverged."""
    known = finite(scores)
    if not known:
        return []
    best, *others = ranked(known)
    apart = differences(known, best)
    return [best, *(name for name in others if (apart[name]["low"] or 0.0) <= 0)]
