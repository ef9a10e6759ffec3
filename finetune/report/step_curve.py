"""Memory by category over a forecast step: the colours of its layers and where they are drawn, for picture and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from finetune.forecast.job_forecast import WORDS, Forecast
from finetune.report import words

# From bottom to top. Any two differ by 20 in CIE Lab and neighbours by 30, also for protanopia, deuteranopia and
# tritanopia (simulated with the matrices of Machado, Oliveira and Fernandes, 2009).
COLOURS = {
    "context": "#ADAFB1",
    "base_weights": "#1F3A7A",
    "quantization_state": "#79D1F2",
    "adapter": "#257777",
    "optimizer_states": "#C9EDC0",
    "gradients": "#6B153A",
    "layer_inputs": "#F0D88A",
    "activations": "#D9590F",
    "loss": "#CB7F6F",
    "workspace": "#422103",
}

FAR_ABOVE = 3
"""A budget above this multiple of the need is not drawn, since it would squeeze the curve."""

# The update has few allocations and would be too narrow for its label.
_NARROWEST_PHASE = 0.15


def chart(planned: Forecast) -> list[dict[str, Any]]:
    """The chart of a forecast for `charts.js`, as those of `curves.py`; none without a traced step.

    Layers are given as sums, the topmost first, so that each is drawn over the one above it. `marks` are the phases
    with the steps at which they begin.
    """
    curve, outside_bytes = planned.curve, planned.device.outside_bytes
    if not curve:
        return []
    unit = words.unit_of(planned.needed_bytes)
    counts, heights = phases(planned), layers(planned)
    steps = list(edges(list(counts.values())))[:-1]
    series = [
        {"name": WORDS[category], "style": "layer", "colour": COLOURS[category], "values": _in(unit, total)}
        for category, total in zip(heights, accumulate(heights.values(), _added), strict=True)
    ][::-1]
    lines = {}
    if planned.budget_bytes <= FAR_ABOVE * planned.needed_bytes:
        lines["budget"] = [planned.budget_bytes] * len(curve)
    if planned.device.type != "cpu":
        lines["reserved"] = [point.reserved_bytes + outside_bytes for point in curve]
    series += [{"name": name, "style": "limit", "values": _in(unit, values)} for name, values in lines.items()]
    starts = accumulate(counts.values(), initial=0)
    return [{
        "title": "Memory over a step", "unit": f"{unit}, in the order of allocations", "form": "digits",
        "marks": [[steps[start], phase] for start, phase in zip(starts, counts, strict=False)],
        "tables": [{"steps": steps, "series": series}],
    }]  # fmt: skip


def phases(planned: Forecast) -> dict[str, int]:
    """The number of the curve's points in each phase, in order."""
    return dict(Counter(point.phase for point in planned.curve))


def layers(planned: Forecast) -> dict[str, list[int]]:
    """Bytes at each point of the curve by category, from the lowest layer; empty categories are left out."""
    outside_bytes = planned.device.outside_bytes
    sizes = {
        category: [point.categories.get(category, outside_bytes) for point in planned.curve] for category in COLOURS
    }
    return {category: heights for category, heights in sizes.items() if any(heights)}


def edges(counts: list[int]) -> Iterator[float]:
    """The x position, from 0 to 1, of each point of the curve, with a minimum width for each phase."""
    shares = [max(count / sum(counts), _NARROWEST_PHASE) for count in counts]
    start = 0.0
    for count, share in zip(counts, shares, strict=True):
        width = share / sum(shares)
        yield from (start + width * number / count for number in range(count))
        start += width
    yield 1.0


def _added(lower: list[int], upper: list[int]) -> list[int]:
    return [below + own for below, own in zip(lower, upper, strict=True)]


def _in(unit: str, sizes: list[int]) -> list[float]:
    return [float(f"{size_bytes / words.UNITS[unit]:.5g}") for size_bytes in sizes]
