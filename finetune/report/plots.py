"""The pictures of runs and forecasts, drawn by matplotlib.

That of a run has the curves of its page (`curves`): loss and, below it, peak memory by phase. That of a forecast has
memory by category over a step, compared with the budget: persistent categories at the bottom in calm colours, temporary
ones above in warm colours, so that the part that settings can reduce stands out.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from finetune.forecast.job_forecast import WORDS, Forecast
from finetune.report import curves, words
from finetune.report.figures import Figures
from finetune.storage.files import write_bytes
from finetune.storage.rundir import RunDirectory


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure


def draw_frame(axes: Any) -> None:
    """Style the axes with a light frame, without top and right spines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.6")
    axes.tick_params(colors="0.25", labelsize=10)
    axes.xaxis.label.set_size(11)
    axes.yaxis.label.set_size(11)


def draw_placeholder(axes: Any, why: str) -> None:
    """Write into the middle of the panel why there is no data."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color="0.5")


def png(figure: Figure) -> bytes:
    """The figure as a PNG, byte for byte reproducible."""
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


# -- a run -------------------------------------------------------------------------------------------------------------

# Okabe and Ito's palette (jfly.uni-koeln.de/color), which colour-blind readers can tell apart; the loss is blue.
_BLUE = "#0072B2"
_PHASE_COLOURS = {"forward": "#56B4E9", "backward": "#CC79A7", "optimizer": "#009E73", "evaluation": "#D55E00"}
_FAINT = {"linewidth": 0.8, "alpha": 0.35}
_STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.8},
    "points": {"linewidth": 1, "linestyle": ":", "marker": "o", "markersize": 7, "zorder": 3},
    **dict.fromkeys(("faint", "high", "low"), _FAINT),
}

# With fewer steps, each is drawn as a point.
_FEW_STEPS = 20


def training(run: RunDirectory) -> Path:
    """Plot the run as currently on disk, finished or not; return the PNG's path."""
    figures = Figures.read(run)
    loss, memory = curves.loss(figures), curves.memory(figures)
    paper = new_figure(9, 6.6)
    upper, lower = paper.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    best = figures.best_evaluation
    named = {"evaluation": f"eval loss, best {words.loss(best['eval_loss'])} at step {best['step']}"} if best else {}
    _draw(upper, loss, "loss", named)
    _draw(lower, memory, "peak memory", {})
    if broken := [line["step"] for line in figures.training if line["loss"] is None]:
        upper.axvline(broken[0], color="crimson", linestyle="--", linewidth=1.2, label="loss is not finite")
    if sizes := [size for _, _, sizes in _series(memory) for size in sizes if size is not None]:
        # The axis spans at least a quarter of the peak, so that small changes look small.
        half = 0.6 * max(max(sizes) - min(sizes), max(sizes) / 4) or 1
        middle = (max(sizes) + min(sizes)) / 2
        lower.set_ylim(max(0.0, middle - half), middle + half)
    lower.set_xlabel("optimizer step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.grid(color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        draw_frame(axes)
        if axes.has_data():
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=10, borderaxespad=0.2)
        else:
            draw_placeholder(axes, "nothing recorded yet")
    paper.align_ylabels()
    write_bytes(run.plot_file, png(paper))
    return run.plot_file


def _series(chart: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[int], list[float | None]]]:
    """(series, its steps, its values) of a chart."""
    return ((series, table["steps"], series["values"]) for table in chart["tables"] for series in table["series"])


def _draw(axes: Any, chart: dict[str, Any], title: str, named: dict[str, str]) -> None:
    """Draw the series of a chart that have points; `named` are other names for the legend."""
    axes.set_ylabel(f"{title} ({chart['unit']})")
    for series, steps, values in _series(chart):
        few = {"marker": "o", "markersize": 3.5} if len(steps) < _FEW_STEPS else {}
        if steps:
            axes.plot(
                steps, values, color=_PHASE_COLOURS.get(series["name"], _BLUE),
                label=named.get(series["name"], series["name"]), **{**few, **_STYLES[series["style"]]},
            )  # fmt: skip


# -- a forecast --------------------------------------------------------------------------------------------------------

_INK, _WARNING = "#20262C", "#B00020"
_PAPER = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}

_HEADROOM = 1.16
# A longer title is printed smaller.
_TITLE_LETTERS = 100


def forecast(planned: Forecast) -> bytes:
    """The plot of the forecast as a PNG."""
    return png(forecast_figure(planned))


def forecast_figure(planned: Forecast) -> Figure:
    """The plot of the forecast as a figure."""
    paper = new_figure(10, 5.2)
    axes = paper.subplots()
    title = f"{words.verdict(planned)}; {words.batch(planned.batch)}"
    fontsize = 11 * min(1.0, _TITLE_LETTERS / len(title))
    colour = _INK if planned.fits else _WARNING
    paper.suptitle(title, x=0.015, ha="left", fontsize=fontsize, color=colour, parse_math=False)
    unit = words.unit_of(planned.needed_bytes)
    axes.set_ylabel(f"memory ({unit})")
    draw_frame(axes)
    if planned.curve:
        _MemoryPlot(planned, axes, words.UNITS[unit]).draw()
    else:
        axes.set_axis_off()
        draw_placeholder(axes, "no step was traced")
    return paper


class _MemoryPlot:
    """One forecast's curve on its axes. Sizes are in bytes until they are drawn."""

    def __init__(self, planned: Forecast, axes: Any, unit_bytes: int) -> None:
        self._planned, self._axes, self._unit_bytes = planned, axes, unit_bytes
        self._outside_bytes = planned.device.outside_bytes
        curve = planned.curve
        self._phases = curves.step_phases(planned)
        self._edges = list(curves.step_edges(list(self._phases.values())))
        self._peak_at = max(range(len(curve)), key=lambda at: sum(curve[at].categories.values()))
        self._peak_x = (self._edges[self._peak_at] + self._edges[self._peak_at + 1]) / 2
        # The exact peaks within the step; the curve is sampled and may miss them.
        self._step_peak_bytes, self._reserved_peak_bytes = (
            max(planned.phases[phase][measure] for phase in self._phases) + self._outside_bytes
            for measure in ("allocated_bytes", "reserved_bytes")
        )
        self._highest_bytes = max(self._step_peak_bytes, self._reserved_peak_bytes)
        self._budget_is_near = planned.budget_bytes <= curves.FAR_ABOVE * self._highest_bytes

    def draw(self) -> None:
        self._draw_areas()
        self._draw_phases()
        top_bytes = max(self._highest_bytes, self._planned.budget_bytes if self._budget_is_near else 0)
        self._axes.set(xlim=(0, 1), ylim=(0, top_bytes * _HEADROOM / self._unit_bytes))
        self._draw_budget()
        self._draw_peak()
        self._axes.legend(  # beside the plot, in the order of the layers
            reverse=True, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=10, title="at the peak",
            title_fontsize=10, alignment="left", borderaxespad=0,
        )  # fmt: skip

    def _draw_areas(self) -> None:
        """Draw live memory as layers, and on CUDA reserved memory as a line."""
        sizes = curves.step_layers(self._planned)
        self._axes.stackplot(
            self._edges, *map(self._drawn, sizes.values()), step="post", linewidth=0,
            colors=[curves.COLOURS[category] for category in sizes],
            labels=[self._named(category, heights) for category, heights in sizes.items()],
        )  # fmt: skip
        if self._planned.device.type != "cpu":
            reserved = [point.reserved_bytes + self._outside_bytes for point in self._planned.curve]
            self._axes.plot(
                self._edges, self._drawn(reserved), color=_INK, linewidth=1.1, drawstyle="steps-post", zorder=4,
                label=f"reserved, up to {words.size(self._reserved_peak_bytes)}",
            )  # fmt: skip

    def _named(self, category: str, values: list[int]) -> str:
        """The layer's name and size at the peak; an underscore keeps layers that are too thin out of the legend."""
        if words.is_nothing(max(values)):
            return f"_{WORDS[category]}"
        planned = self._planned
        in_step = self._step_peak_bytes == planned.peak_allocated_bytes + self._outside_bytes
        at_peak = planned.categories[category] if in_step else values[self._peak_at]
        return WORDS[category] if words.is_nothing(at_peak) else f"{WORDS[category]}, {words.size(at_peak)}"

    def _draw_phases(self) -> None:
        """Draw phase names below the axis, and thin lines between the phases."""
        borders = [self._edges[end] for end in accumulate(self._phases.values(), initial=0)]
        for border in borders[1:-1]:
            self._axes.axvline(border, color="0.35", linewidth=0.7, linestyle=":")
        middles = [(left + right) / 2 for left, right in pairwise(borders)]
        self._axes.set_xticks(middles, list(self._phases))
        self._axes.tick_params(axis="x", length=0, labelsize=11)
        label = "one micro-batch and the update, in the order of allocations (not to the scale of time)"
        planned = self._planned
        if planned.needed_bytes > self._reserved_peak_bytes:
            [elsewhere, *_] = (
                name for name, sizes in planned.phases.items() if sizes["reserved_bytes"] == planned.peak_reserved_bytes
            )
            label += f"\nthe most, {words.size(planned.needed_bytes)}, is needed outside the step: {elsewhere}"
        self._axes.set_xlabel(label, fontsize=9, color="0.35")

    def _draw_budget(self) -> None:
        text = f"budget {words.size(self._planned.budget_bytes)}"
        # Opposite the label of the peak, which may be at the same height.
        x, align = (0.012, "left") if self._peak_x > 0.5 else (0.988, "right")
        if not self._budget_is_near:
            text += f", more than {curves.FAR_ABOVE} times what is shown"
            self._axes.text(
                x, 0.985, text, transform=self._axes.transAxes, ha=align, va="top", fontsize=10, color=_INK, bbox=_PAPER
            )
            return
        height = self._planned.budget_bytes / self._unit_bytes
        outline = withStroke(linewidth=3.4, foreground="white")  # for contrast with the areas it crosses
        self._axes.axhline(
            height, color=_WARNING, linewidth=1.6, linestyle="--", zorder=4, gid="budget", path_effects=[outline]
        )
        self._axes.annotate(
            text, (x, height), xytext=(0, 4), textcoords="offset points", ha=align, va="bottom", fontsize=10,
            color=_WARNING, bbox=_PAPER, zorder=4,
        )  # fmt: skip

    def _draw_peak(self) -> None:
        x, height = self._peak_x, self._step_peak_bytes / self._unit_bytes
        self._axes.plot([x], [height], marker="o", markersize=5, color=_INK, linestyle="none")
        # Below the point and over the line of reserved memory, which may be close above and lower where it rises.
        offset, align = ((-8, -3), "right") if x > 0.25 else ((8, -3), "left")
        self._axes.annotate(
            f"peak {words.size(self._step_peak_bytes)}", (x, height), xytext=offset, textcoords="offset points",
            ha=align, va="top", fontsize=10, color=_INK, bbox=_PAPER, zorder=5,
        )  # fmt: skip

    def _drawn(self, sizes: list[int]) -> list[float]:
        """Heights in the axis's unit; the last value extends to the right edge."""
        return [size_bytes / self._unit_bytes for size_bytes in [*sizes, sizes[-1]]]
