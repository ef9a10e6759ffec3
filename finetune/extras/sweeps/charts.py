"""The charts of a sweep for its page: the curves of its runs on one scale, and the loss by the values of each key."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.report import curves, words


def within_sight(charts: Sequence[dict[str, Any]], names: Collection[str]) -> list[dict[str, Any]]:
    """The charts of several runs, cut off far above the losses of the runs `names`."""

    def seen(chart: dict[str, Any]) -> dict[str, Any]:
        series = [one for table in chart["tables"] for one in table["series"]]
        kept = [value for one in series if one["name"] in names for value in one["values"] if value is not None]
        top = 2 * max(kept, default=math.inf) - min(kept, default=0.0)
        if all(value is None or value <= top for one in series for value in one["values"]):
            return chart
        return {**chart, "unit": f"{chart['unit']}, higher ones cut off", "top": curves.short(top)}

    return [seen(chart) if chart["title"] in ("Evaluation loss", "Training loss") else chart for chart in charts]


@dataclass(frozen=True)
class ByValue:
    """How far the best setting with a `value` of a key is from the best of all, as (low, value, high).

    `early` says after how much of a run, if not the whole. `difference` is None if it diverged.
    """

    value: Any
    difference: tuple[float | None, float, float | None] | None
    early: str = ""


_SPREAD = 4
"""Differences above this multiple of the largest one of a whole run are drawn at the upper edge."""


def by_value(title: str, unit: str, key: str, points: Sequence[ByValue]) -> dict[str, Any]:
    """The chart of differences by the values of a config key, in the order given.

    Positive numbers are drawn on a logarithmic axis, others evenly spaced: from 0 to their number less 1. Those that
    were compared early have a mark of their own, as have those that are off the scale.
    """
    whole = [point for point in points if point.difference and not point.early]
    above = [point.difference[1] for point in points if point.difference and point.difference[1] > 0]
    limit = _SPREAD * (max((_top(point) for point in whole), default=0.0) or min(above, default=0.0))
    shown = [point for point in points if point.difference and point.difference[1] <= limit]
    edge = 1.15 * max(map(_top, shown), default=0.0)

    def values(of: Sequence[ByValue], at: int) -> list[float | None]:
        return [point.difference[at] if point in of and point.difference else None for point in points]

    def text(point: ByValue) -> str:
        """The legend of a point that was compared before the end of its run, or diverged."""
        after = f" after {point.early}" if point.early else ""
        return f"{point.difference[1]:+.4f}{after}" if point.difference else f"diverged{after}"

    ticks, last = [*map(float, range(len(points)))], len(points) - 1
    numbers = [point.value for point in points]
    if all(isinstance(number, (int, float)) and not isinstance(number, bool) and number > 0 for number in numbers):
        width = math.log(numbers[-1] / numbers[0])
        ticks = [round(last * math.log(number / numbers[0]) / width, 4) for number in numbers]
    early, beyond = [point for point in shown if point.early], [point for point in points if point not in shown]
    ends = [("95%, high", "high", values(whole, 2)), ("95%, low", "low", values(whole, 0))]
    table = curves.table([[{"step": tick}] for tick in ticks], *ends, ("whole run", "line", values(whole, 1)))
    marks = [
        ("part of a run", "hollow", early, values(early, 1)),
        ("off the scale", "beyond", beyond, [edge if point in beyond else None for point in points]),
    ]
    table["series"] += [
        {"name": name, "style": style, "values": drawn,
         "texts": [text(point) if point in marked else "" for point in points]}
        for name, style, marked, drawn in marks
        if marked
    ]  # fmt: skip
    labels = [words.as_in_a_file(point.value) for point in points]
    return {**curves.chart(title, unit, "fixed", table), "along": key, "labels": labels}


def _top(point: ByValue) -> float:
    """The upper end of a point's interval, or the point itself."""
    return max(number for number in point.difference or () if number is not None)
