"""Shared by the plots of runs and forecasts: figure and frame."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def new(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure


def frame(axes: Any) -> None:
    """Style the axes with a light frame, without top and right spines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.6")
    axes.tick_params(colors="0.25", labelsize=10)
    axes.xaxis.label.set_size(11)
    axes.yaxis.label.set_size(11)


def say_nothing_there(axes: Any, why: str) -> None:
    """Write into the middle of the panel why there is no data."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color="0.5")


def png(figure: Figure) -> bytes:
    """The figure as a PNG, byte for byte reproducible."""
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()
