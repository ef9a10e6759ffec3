"""The plot of a run: the curves of its page (`curves`) of loss and, below it, of peak memory by phase."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from finetune.report import canvas, curves, words
from finetune.report.figures import Figures
from finetune.storage.files import write_bytes
from finetune.storage.rundir import RunDirectory

# Okabe and Ito's palette (jfly.uni-koeln.de/color), which colour-blind readers can tell apart; the loss is blue.
_BLUE = "#0072B2"
_COLOURS = {"forward": "#56B4E9", "backward": "#CC79A7", "optimizer": "#009E73", "evaluation": "#D55E00"}
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
    paper = canvas.new(9, 6.6)
    upper, lower = paper.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    best = figures.best_evaluation
    named = {"evaluation": f"eval loss, best {words.loss(best['eval_loss'])} at step {best['step']}"} if best else {}
    _draw(upper, loss, "loss", named)
    _draw(lower, memory, "peak memory", {})
    if broken := [line["step"] for line in figures.training if line["loss"] is None]:
        upper.axvline(broken[0], color="crimson", linestyle="--", linewidth=1.2, label="loss is not finite")
    if sizes := [size for _, _, sizes in _series(memory) for size in sizes if size is not None]:
        lower.set_ylim(*_limits(min(sizes), max(sizes)))
    lower.set_xlabel("optimizer step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        _finish(axes)
    paper.align_ylabels()
    write_bytes(run.plot_file, canvas.png(paper))
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
                steps, values, color=_COLOURS.get(series["name"], _BLUE),
                label=named.get(series["name"], series["name"]), **{**few, **_STYLES[series["style"]]},
            )  # fmt: skip


def _limits(lowest: float, highest: float) -> tuple[float, float]:
    """Limits of an axis that spans at least a quarter of the peak, so that small changes look small."""
    half = 0.6 * max(highest - lowest, highest / 4) or 1
    middle = (highest + lowest) / 2
    return max(0.0, middle - half), middle + half


def _finish(axes: Any) -> None:
    """Add a grid, the frame, and a legend above the panel."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    canvas.frame(axes)
    if axes.has_data():
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=10, borderaxespad=0.2)
    else:
        canvas.say_nothing_there(axes, "nothing recorded yet")
