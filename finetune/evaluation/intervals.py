"""Confidence intervals: a percentile bootstrap over rows, with the same rows drawn for each model; Student's t over
seeds.

Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13. Drawing the same rows for two models pairs them, so
the interval of their difference leaves out how much rows differ from one another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES, CONFIDENCE, SEED = 1000, 0.95, 0

# Standard errors on either side of a value that hold CONFIDENCE of a normal distribution.
_DEVIATIONS = 1.959964

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5% point of Student's t by degrees of freedom, from 1 (Abramowitz and Stegun, Handbook of Mathematical
Functions, table 26.10). More take the last, which is wider than theirs."""


def half_width(values: Sequence[float]) -> float:
    """Half of the 95% confidence interval of the mean of two values or more, one a seed: t s / sqrt(n)."""
    return _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Measured:
    """A model's value, and the data of its confidence interval.

    `rows` are (sum, count) of each row, float64 (rows, 2); the value is the quotient of the totals, or what `of_totals`
    makes of the totals of other columns. Without rows there may be a standard error.
    """

    value: float
    rows: np.ndarray | None = None
    error: float | None = None
    of_totals: Callable[[np.ndarray], float] = lambda totals: totals[0] / totals[1]

    @classmethod
    def mean(cls, scores: list[float]) -> Measured:
        """The mean of a score per row."""
        rows = np.column_stack([np.asarray(scores, dtype=np.float64), np.ones(len(scores))])
        return cls(float(rows[:, 0].mean()), rows)


@np.errstate(over="ignore", invalid="ignore")  # exp of a loss above 709 is infinite
def compared(models: Mapping[str, Measured], of: Callable[[Any], Any] = lambda values: values) -> dict[str, Any]:
    """Each model's `value`, `low` and `high`, and its `difference` (the same three) to the first model, as JSON values.

    `of` is applied to values and draws. None stands for a number that is not finite, and for an unknown bound: with a
    single row that counts, or of a difference without rows.
    """
    figures: dict[str, dict[str, Any]] = {}
    values = {name: float(of(np.float64(one.value))) for name, one in models.items()}
    drawn = {name: of(ratios) for name, ratios in _draws(models).items()}
    first = next(iter(models))
    for name, one in models.items():
        if name in drawn:
            figures[name] = _with_bounds(values[name], drawn[name])
        else:
            margin = math.nan if one.error is None else _DEVIATIONS * one.error
            figures[name] = _numbers(values[name], values[name] - margin, values[name] + margin)
        if name != first:
            differences = drawn[name] - drawn[first] if name in drawn else np.full(1, math.nan)
            figures[name]["difference"] = _with_bounds(values[name] - values[first], differences)
    return figures


def _draws(models: Mapping[str, Measured]) -> dict[str, np.ndarray]:
    """Each model's value of the totals over RESAMPLES draws of as many rows; nothing if they cannot be paired.

    Rows that count nothing, such as undesirable answers in a mean over desirable ones, are not drawn: where those that
    count are rare, many draws would have none. Each kind of row is a sample of its own (Davison and Hinkley, Bootstrap
    Methods and their Application, section 3.2).
    """
    rows = {name: one.rows for name, one in models.items() if one.rows is not None}
    if len(rows) < len(models) or len({len(one) for one in rows.values()}) != 1:
        return {}
    counting = np.any([one.any(axis=1) for one in rows.values()], axis=0)
    rows = {name: one[counting] for name, one in rows.items()}
    if (count := int(counting.sum())) < 2:
        return {}
    generator = np.random.default_rng(SEED)
    drawn: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(RESAMPLES):
        chosen = generator.integers(0, count, count)
        for name, one in rows.items():
            drawn[name].append(models[name].of_totals(one[chosen].sum(axis=0)))
    return {name: np.array(values) for name, values in drawn.items()}


def _with_bounds(value: float, draws: np.ndarray) -> dict[str, Any]:
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return _numbers(value, float(low), float(high))


def _numbers(value: float, low: float, high: float) -> dict[str, Any]:
    return {name: one if math.isfinite(one) else None for name, one in (("value", value), ("low", low), ("high", high))}
