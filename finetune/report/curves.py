"""The curves of runs and of a forecast step as numbers for the charts of a page: few points, however long a run is.

A chart is a dict that `charts.js` draws: title, how its values are written, and tables of series over the same steps.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from finetune.forecast.job_forecast import WORDS, Forecast
from finetune.report import words
from finetune.report.figures import Figures
from finetune.runtime.memory_monitor import headline

Line = dict[str, Any]
Reduced = Callable[[Iterable[float | None]], float | None]

POINTS = 800
"""The most points of a curve: a screen shows no more, and 100,000 steps would make a page of 10 MB."""

_PHASES = ("forward", "backward", "optimizer")


def of_run(figures: Figures) -> list[dict[str, Any]]:
    """The charts of one run: loss and evaluation, what its objective records, rate, gradient norm, tokens/s, memory."""
    groups = grouped(figures.training)
    return _drawn(
        loss(figures),
        *of_objective(figures),
        chart("Learning rate", "", "exponent", _of(groups, "learning_rate", last)),
        chart("Gradient norm", "before clipping", "digits", _of(groups, "grad_norm", highest)),
        chart("Tokens per second", "", "whole", _of(groups, "tokens_per_second", mean)),
        memory(figures),
    )


def loss(figures: Figures) -> dict[str, Any]:
    """The chart of the training loss and of the evaluations.

    The training loss is drawn at each step, or for a long run as the range that groups of steps cover; and averaged.
    """
    groups = grouped(figures.training)
    losses = [[line["loss"] for line in group] for group in groups]
    if max(map(len, groups), default=1) > 1:
        raw = [("highest", "high", [*map(highest, losses)]), ("lowest", "low", [*map(lowest, losses)])]
    else:
        raw = [("each step", "faint", [loss for [loss] in losses])]
    values, span_steps = smoothed(groups)
    return chart(
        "Loss", _unit(figures), "fixed",
        table(groups, *raw, (f"mean of {span_steps:,} steps", "line", values)),
        _of(grouped(figures.evaluations), "eval_loss", mean, "evaluation", "points"),
    )  # fmt: skip


def of_objective(figures: Figures) -> list[dict[str, Any]]:
    """A chart for each kind of the objective's statistics, averaged over steps: all `rewards_` but shares in one."""
    groups = grouped(figures.training)
    kinds: dict[str, list[str]] = {}
    for name in figures.statistics:
        kinds.setdefault(name if name.endswith(_SHARES) else name.partition("_")[0], []).append(name)
    charts = []
    for kind, names in kinds.items():
        averages = {words.statistic(name): smoothed(groups, name) for name in names}
        series = ((name, "line", values) for name, (values, _) in averages.items())
        [span_steps] = {steps for _, steps in averages.values()}
        title = words.statistic(kind).capitalize()
        charts.append(chart(title, f"mean of {span_steps:,} steps", "digits", table(groups, *series)))
    return charts


_SHARES = "accuracies"
"""How statistics between 0 and 1 end."""


def _unit(figures: Figures) -> str:
    """The unit over which a loss is a mean: trained tokens or, for an objective that compares answers, rows."""
    return "mean over rows" if figures.statistics else "nats per trained token"


def memory(figures: Figures) -> dict[str, Any]:
    """The chart of peak memory by phase: reserved bytes on CUDA, resident ones on a CPU, as in `headline`."""
    peaks, groups, evaluated = figures.peaks, grouped(figures.training), grouped(figures.evaluations)
    measure = "reserved_bytes" if "reserved_bytes" in words.measures(peaks) else "resident_bytes"
    unit = words.unit_of(max((peak.get(measure, 0) for peak in peaks.values()), default=0))

    def series(phase: str, style: str, groups: Sequence[Sequence[Line]]) -> tuple[str, str, list[float | None]]:
        peaks = ([line.get("memory", {}).get(phase, {}).get(measure) for line in group] for group in groups)
        return phase, style, _in_units(unit, map(highest, peaks))

    return chart(
        "Peak memory by phase", f"{words.MEASURES[measure]}, {unit}", "digits",
        table(groups, *(series(phase, "line", groups) for phase in _PHASES if phase in peaks)),
        table(evaluated, series("evaluation", "points", evaluated)),
    )  # fmt: skip


def of_runs(runs: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """The charts of several runs over each other, a colour each."""
    groups = {name: grouped(figures.training) for name, figures in runs.items()}
    unit = words.unit_of(max((figures.peak_bytes for figures in runs.values()), default=0))

    def each(key: str, reduced: Reduced) -> list[dict[str, Any]]:
        return [_of(lines, key, reduced, name) for name, lines in groups.items()]

    def peaks(lines: Sequence[Sequence[Line]]) -> list[float | None]:
        sizes = ([headline(line.get("memory", {})) or None for line in group] for group in lines)
        return _in_units(unit, map(highest, sizes))

    return _drawn(
        chart("Evaluation loss", " or ".join(sorted({*map(_unit, runs.values())})), "fixed", *(
            _of(grouped(figures.evaluations), "eval_loss", mean, name, "points") for name, figures in runs.items())),
        chart("Training loss", "smoothed", "fixed", *(
            table(lines, (name, "line", smoothed(lines)[0])) for name, lines in groups.items())),
        *(chart(words.statistic(statistic).capitalize(), "smoothed", "digits", *(
            table(groups[name], (name, "line", smoothed(groups[name], statistic)[0]))
            for name, figures in runs.items() if statistic in figures.statistics))
          for statistic in dict.fromkeys(one for figures in runs.values() for one in figures.statistics)),
        chart("Learning rate", "", "exponent", *each("learning_rate", last)),
        chart("Gradient norm", "before clipping", "digits", *each("grad_norm", highest)),
        chart("Tokens per second", "", "whole", *each("tokens_per_second", mean)),
        chart("Peak memory of a step", unit, "digits", *(
            table(lines, (name, "line", peaks(lines))) for name, lines in groups.items())),
    )  # fmt: skip


# -- a step of a forecast ----------------------------------------------------------------------------------------------

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


def of_step(planned: Forecast) -> list[dict[str, Any]]:
    """The chart of a forecast for `charts.js`, none without a traced step.

    Layers are given as sums, the topmost first, so that each is drawn over the one above it. `marks` are the phases
    with the steps at which they begin.
    """
    curve, outside_bytes = planned.curve, planned.device.outside_bytes
    if not curve:
        return []
    unit = words.unit_of(planned.needed_bytes)
    counts, heights = step_phases(planned), step_layers(planned)
    steps = list(step_edges(list(counts.values())))[:-1]
    totals = accumulate(heights.values(), lambda lower, own: list(map(sum, zip(lower, own, strict=True))))
    series = [
        {"name": WORDS[category], "style": "layer", "colour": COLOURS[category], "values": _in_units(unit, total)}
        for category, total in zip(heights, totals, strict=True)
    ][::-1]
    lines = {}
    if planned.budget_bytes <= FAR_ABOVE * planned.needed_bytes:
        lines["budget"] = [planned.budget_bytes] * len(curve)
    if planned.device.type != "cpu":
        lines["reserved"] = [point.reserved_bytes + outside_bytes for point in curve]
    series += [{"name": name, "style": "limit", "values": _in_units(unit, values)} for name, values in lines.items()]
    starts = accumulate(counts.values(), initial=0)
    return [{
        "title": "Memory over a step", "unit": f"{unit}, in the order of allocations", "form": "digits",
        "marks": [[steps[start], phase] for start, phase in zip(starts, counts, strict=False)],
        "tables": [{"steps": steps, "series": series}],
    }]  # fmt: skip


def step_phases(planned: Forecast) -> dict[str, int]:
    """The number of the curve's points in each phase, in order."""
    return dict(Counter(point.phase for point in planned.curve))


def step_layers(planned: Forecast) -> dict[str, list[int]]:
    """Bytes at each point of the curve by category, from the lowest layer; empty categories are left out."""
    outside_bytes = planned.device.outside_bytes
    sizes = {
        category: [point.categories.get(category, outside_bytes) for point in planned.curve] for category in COLOURS
    }
    return {category: heights for category, heights in sizes.items() if any(heights)}


def step_edges(counts: list[int]) -> Iterator[float]:
    """The x position, from 0 to 1, of each point of the curve, with a minimum width for each phase."""
    shares = [max(count / sum(counts), _NARROWEST_PHASE) for count in counts]
    start = 0.0
    for count, share in zip(counts, shares, strict=True):
        width = share / sum(shares)
        yield from (start + width * number / count for number in range(count))
        start += width
    yield 1.0


def _in_units(unit: str, sizes: Iterable[float | None]) -> list[float | None]:
    return [None if size_bytes is None else short(size_bytes / words.UNITS[unit]) for size_bytes in sizes]


# -- fewer points ------------------------------------------------------------------------------------------------------


def grouped(lines: Sequence[Line]) -> list[Sequence[Line]]:
    """Consecutive lines in at most POINTS groups of equal size."""
    size = max(1, math.ceil(len(lines) / POINTS))
    return [lines[at : at + size] for at in range(0, len(lines), size)]


def mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def lowest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def last(values: Iterable[float | None]) -> float | None:
    return [*values][-1]


def smoothed(groups: Sequence[Sequence[Line]], key: str = "loss") -> tuple[list[float], int]:
    """The centred moving average of a value of the lines over the groups, and the number of steps it is taken over.

    It is taken over fewer at either end; values that are missing or not finite are left out.
    """
    span = max(5, len(groups) // 20) | 1  # odd, to be centred
    means = [mean(line.get(key) for line in group) for group in groups]
    values = []
    for at in range(len(means)):
        window = means[max(0, at - span // 2) : at + span // 2 + 1]
        finite = [value for value in window if value is not None and math.isfinite(value)]
        values.append(statistics.fmean(finite) if finite else math.nan)
    return values, span * max(map(len, groups), default=1)


# -- charts ------------------------------------------------------------------------------------------------------------


def _of(
    groups: Sequence[Sequence[Line]], key: str, reduced: Reduced, name: str = "", style: str = "line"
) -> dict[str, Any]:
    values = [reduced(line[key] for line in group) for group in groups]
    return table(groups, (name or key.replace("_", " "), style, values))


def table(groups: Sequence[Sequence[Line]], *series: tuple[str, str, Sequence[float | None]]) -> dict[str, Any]:
    """Series of (name, style, values), a value a group, each at the last step of its group. JSON has no NaN."""
    return {
        "steps": [group[-1]["step"] for group in groups],
        "series": [
            {"name": name, "style": style, "values": [short(value) for value in values]}
            for name, style, values in series
        ],
    }


def short(value: float | None) -> float | None:
    """The value with five digits, more than a chart shows; None for one that JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def chart(title: str, unit: str, form: str, *tables: dict[str, Any]) -> dict[str, Any]:
    return {"title": title, "unit": unit, "form": form, "tables": [table for table in tables if table["series"]]}


def _drawn(*charts: dict[str, Any]) -> list[dict[str, Any]]:
    """The charts that have points."""
    return [one for one in charts if any(table["steps"] for table in one["tables"])]
