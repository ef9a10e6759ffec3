"""The plot of a run: loss by step and, below it, peak memory by phase."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from finetune.report import canvas, curves, words
from finetune.results.figures import Figures
from finetune.storage.files import write_bytes
from finetune.storage.rundir import RunDirectory

# Okabe and Ito's palette (jfly.uni-koeln.de/color), which colour-blind readers can tell apart.
_BLUE, _SKY, _GREEN, _ORANGE, _PINK = "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7"
_PHASE_COLOURS = {"forward": _SKY, "backward": _PINK, "optimizer": _GREEN}
_EVALUATION_COLOUR = _ORANGE

# With fewer steps, each is drawn as a point, and there is no smoothed line.
_FEW_STEPS = 20


def training(run: RunDirectory) -> Path:
    """Plot the run as currently on disk, finished or not; return the PNG's path."""
    figures = Figures.read(run)
    paper = canvas.new(9, 6.6)
    upper, lower = paper.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_losses(upper, figures)
    _draw_memory(lower, figures)
    lower.set_xlabel("optimizer step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        _finish(axes)
    paper.align_ylabels()
    write_bytes(run.plot_file, canvas.png(paper))
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
        groups = curves.grouped(figures.training)
        means, span_steps = curves.smoothed(groups)
        label = f"mean over {span_steps} steps"
        axes.plot([group[-1]["step"] for group in groups], means, color=_BLUE, linewidth=2, label=label)
    if figures.evaluations:
        best = figures.best_evaluation
        axes.plot(
            [line["step"] for line in figures.evaluations],
            [_number(line["eval_loss"]) for line in figures.evaluations],
            color=_EVALUATION_COLOUR, linestyle=":", linewidth=1, marker="o", markersize=7, zorder=3,
            label=f"eval loss, best {words.loss(best['eval_loss'])} at step {best['step']}" if best else "eval loss",
        )  # fmt: skip
    broken = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
    if broken:
        axes.axvline(broken[0], color="crimson", linestyle="--", linewidth=1.2, label="loss is not finite")


def _draw_memory(axes: Any, figures: Figures) -> None:
    # As in monitor.headline: reserved bytes on CUDA, resident bytes on a CPU.
    measure = "reserved_bytes" if "reserved_bytes" in words.measures(figures.peaks) else "resident_bytes"
    lines = {phase: _series(figures.training, phase, measure) for phase in _PHASE_COLOURS}
    evaluations = _series(figures.evaluations, "evaluation", measure)
    sizes = [size for _, series in [*lines.values(), evaluations] for size in series]
    unit = words.unit_of(max(sizes, default=0))
    unit_bytes = words.UNITS[unit]
    axes.set_ylabel(f"peak {words.MEASURES[measure]} ({unit})")
    few = len(figures.training) < _FEW_STEPS
    for phase, (steps, sizes_bytes) in lines.items():
        if steps:
            axes.plot(
                steps, [size / unit_bytes for size in sizes_bytes], color=_PHASE_COLOURS[phase], linewidth=1.6,
                marker="o" if few else None, markersize=3.5, label=phase,
            )  # fmt: skip
    if evaluations[0]:
        steps, sizes_bytes = evaluations
        axes.plot(
            steps, [size / unit_bytes for size in sizes_bytes], color=_EVALUATION_COLOUR, linestyle="none", marker="D",
            markersize=6, label="evaluation",
        )  # fmt: skip
    if sizes:
        axes.set_ylim(*_limits(min(sizes) / unit_bytes, max(sizes) / unit_bytes))


def _series(lines: list[dict[str, Any]], phase: str, measure: str) -> tuple[list[int], list[int]]:
    """Steps and bytes of the lines that include the phase."""
    points = [(line["step"], line.get("memory", {}).get(phase, {}).get(measure)) for line in lines]
    measured = [(step, size_bytes) for step, size_bytes in points if size_bytes is not None]
    return [step for step, _ in measured], [size_bytes for _, size_bytes in measured]


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


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss
