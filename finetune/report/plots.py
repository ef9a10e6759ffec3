"""The plot of a run: loss over steps, and below it the peak memory of each phase."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from finetune.report import words
from finetune.report.figures import MEASURES, Figures, measures, smooth
from finetune.storage.files import write_bytes
from finetune.storage.rundir import RunDirectory

# Okabe and Ito's palette (jfly.uni-koeln.de/color), which colour-blind readers can tell apart.
_BLUE, _SKY, _GREEN, _ORANGE, _PINK = "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7"
_PHASE_COLOURS = {"forward": _SKY, "backward": _PINK, "optimizer": _GREEN}
_EVALUATION_COLOUR = _ORANGE

# Below so many steps every step is drawn as a point of its own, and a smoothed line would say nothing more.
_FEW_STEPS = 20
_UNITS = {"GiB": 2**30, "MiB": 2**20}


def training(run: RunDirectory) -> Path:
    """Draw the run as it stands on disk, finished or not, and return the PNG's path."""
    figures = Figures.read(run)
    figure = Figure(figsize=(9, 6.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_losses(upper, figures)
    _draw_memory(lower, figures)
    lower.set_xlabel("optimizer step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        _finish(axes)
    figure.align_ylabels()
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    write_bytes(run.plot_file, image.getvalue())
    return run.plot_file


def _draw_losses(axes: Any, figures: Figures) -> None:
    steps = [line["step"] for line in figures.training]
    losses = [_number(line["loss"]) for line in figures.training]
    axes.set_ylabel("loss (nats per trained token)")
    few = len(steps) < _FEW_STEPS
    if steps:
        axes.plot(
            steps, losses, color=_BLUE, linewidth=1.2 if few else 0.8, alpha=1 if few else 0.35,
            marker="o" if few else None, markersize=3.5, label="training loss",
        )  # fmt: skip
    if not few:
        span_steps = max(5, len(steps) // 20) | 1  # odd, so that it has a middle
        label = f"mean over {span_steps} steps"
        axes.plot(steps, smooth(losses, span_steps), color=_BLUE, linewidth=2, label=label)
    if figures.evaluations:
        best = figures.best_evaluation
        axes.plot(
            [line["step"] for line in figures.evaluations],
            [_number(line["eval_loss"]) for line in figures.evaluations],
            color=_EVALUATION_COLOUR, linestyle=":", linewidth=1, marker="o", markersize=7, zorder=3,
            label=f"held-out, best {words.loss(best['eval_loss'])} at step {best['step']}" if best else "held-out",
        )  # fmt: skip
    broken = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
    if broken:
        axes.axvline(broken[0], color="crimson", linestyle="--", linewidth=1.2, label="loss is not finite")


def _draw_memory(axes: Any, figures: Figures) -> None:
    peaks = figures.peaks
    measure = _headline_measure(measures(peaks))
    lines = {phase: _series(figures.training, phase, measure) for phase in _PHASE_COLOURS}
    evaluations = _series(figures.evaluations, "evaluation", measure)
    sizes = [size for series in [*lines.values(), evaluations] for _, size in series]
    unit = "GiB" if max(sizes, default=0) >= _UNITS["GiB"] else "MiB"
    axes.set_ylabel(f"peak {MEASURES[measure]} ({unit})")
    few = len(figures.training) < _FEW_STEPS
    for phase, series in lines.items():
        if series:
            steps, values = _columns(series, unit)
            axes.plot(
                steps, values, color=_PHASE_COLOURS[phase], linewidth=1.6, marker="o" if few else None, markersize=3.5,
                label=phase,
            )  # fmt: skip
    if evaluations:
        steps, values = _columns(evaluations, unit)
        axes.plot(
            steps, values, color=_EVALUATION_COLOUR, linestyle="none", marker="D", markersize=6, label="evaluation"
        )
    if sizes:
        axes.set_ylim(*_limits(min(sizes) / _UNITS[unit], max(sizes) / _UNITS[unit]))


def _headline_measure(found: list[str]) -> str:
    """What memory.monitor.headline takes: reserved bytes on CUDA, resident bytes on a CPU."""
    return "reserved_bytes" if "reserved_bytes" in found else "resident_bytes"


def _series(lines: list[dict[str, Any]], phase: str, measure: str) -> list[tuple[int, int]]:
    """(step, bytes) of the lines that have the phase."""
    found = ((line["step"], line.get("memory", {}).get(phase, {}).get(measure)) for line in lines)
    return [(step, size_bytes) for step, size_bytes in found if size_bytes is not None]


def _columns(series: list[tuple[int, int]], unit: str) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [size_bytes / _UNITS[unit] for _, size_bytes in series]


def _limits(lowest: float, highest: float) -> tuple[float, float]:
    """An axis that spans at least a quarter of the peak, so that what hardly changes looks as if it hardly changes."""
    half = 0.6 * max(highest - lowest, highest / 4) or 1
    middle = (highest + lowest) / 2
    return max(0.0, middle - half), middle + half


def _finish(axes: Any) -> None:
    """Grid, frame, and the legend above the panel, where it covers nothing."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.6")
    axes.tick_params(colors="0.25", labelsize=10)
    axes.yaxis.label.set_size(11)
    axes.xaxis.label.set_size(11)
    if axes.has_data():
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=10, borderaxespad=0.2)
    else:
        axes.text(0.5, 0.5, "nothing recorded yet", transform=axes.transAxes, ha="center", va="center", color="0.5")


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss
