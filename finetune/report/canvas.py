"""What the plot of a run and the plot of a forecast share: figure, frame and units."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

UNITS = {"GiB": 2**30, "MiB": 2**20}


def new(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure


def frame(axes: Any) -> None:
    """A light frame without its top and right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.6")
    axes.tick_params(colors="0.25", labelsize=10)
    axes.xaxis.label.set_size(11)
    axes.yaxis.label.set_size(11)


def say_nothing_there(axes: Any, why: str) -> None:
    """Write why there is nothing to see in the middle of the panel."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color="0.5")


def png(figure: Figure) -> bytes:
    """The figure as a PNG, the same for the same figure."""
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def unit_of(size_bytes: int) -> str:
    """The unit in which a size has two to four digits before the point."""
    return "GiB" if size_bytes >= UNITS["GiB"] else "MiB"
