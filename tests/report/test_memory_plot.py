"""What the picture of a forecast shows, read back from the things that it is drawn of."""

from __future__ import annotations

import dataclasses
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from forecasts import GIB, MIB, forecast
from matplotlib.colors import to_rgb

from finetune.forecast.job_forecast import WORDS, Forecast
from finetune.report import curves, plots

# From bottom to top at each of the five points, in GiB: 1 of context, 3 of weights, 0.25 of states, then what changes.
_TOPS = [4.25, 5.25, 6.5, 5.25, 4.75]


def axes_of(planned: Forecast) -> Any:
    (axes,) = plots.forecast_figure(planned).axes
    return axes


def outline(area: Any) -> list[tuple[float, float, float]]:
    """(left edge, bottom, top) of each column of a layer, from its polygon of steps."""
    (path,) = area.get_paths()
    heights: dict[float, list[float]] = {}
    # Two vertices stand at each inner edge, one for either side, on the way there above and on the way back below.
    for (x, y), (next_x, next_y) in pairwise(path.vertices):
        if y == next_y and x != next_x:
            heights.setdefault(round(min(x, next_x), 9), []).append(y)
    return [(x, min(ys), max(ys)) for x, ys in sorted(heights.items())]


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def budget_lines(axes: Any) -> list[float]:
    return [line.get_ydata()[0] for line in axes.lines if line.get_gid() == "budget"]


def test_the_layers_lie_on_each_other_as_thick_as_their_categories_in_the_legends_order() -> None:
    layers = [outline(area) for area in axes_of(forecast()).collections]
    assert len(layers) == 5
    assert [bottom for _, bottom, _ in layers[0]] == [0] * 5
    for lower, upper in pairwise(layers):
        assert [top for _, _, top in lower] == pytest.approx([bottom for _, bottom, _ in upper])
    assert [top for _, _, top in layers[-1]] == pytest.approx(_TOPS)
    thickness = {
        area.get_label().split(",")[0]: [round(top - bottom, 6) for _, bottom, top in outline(area)]
        for area in axes_of(forecast()).collections
    }
    assert thickness == {
        "context and libraries": [1.0] * 5, "base weights": [3.0] * 5, "optimizer states": [0.25] * 5,
        "gradients": [0, 0, 0.25, 0.5, 0.5], "activations": [0, 1, 2, 0.5, 0],
    }  # fmt: skip
    assert legend(axes_of(forecast())) == [
        "reserved, up to 7.00 GiB", "activations, 2.00 GiB", "gradients, 256 MiB", "optimizer states, 256 MiB",
        "base weights, 3.00 GiB", "context and libraries, 1.00 GiB",
    ]  # fmt: skip


def test_every_category_has_a_colour_of_its_own() -> None:
    colours = curves.COLOURS
    assert set(colours) == set(WORDS) - {"communicators", "allocator_slack"}
    assert len(set(colours.values())) == len(colours)


# What eyes without one kind of cones make of linear red, green and blue: Machado, Oliveira and Fernandes (2009),
# table 1, severity 1.
_EYES = {
    "all cones": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(colour: str, eye: Any) -> Any:
    """A colour in CIE Lab (white: D65) as that eye sees it."""
    stored = np.array(to_rgb(colour))
    linear = np.where(stored <= 0.04045, stored / 12.92, ((stored + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(np.array(eye) @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", _EYES)
def test_colours_differ_for_colour_blind_readers(eye: str) -> None:
    seen = [lab(colour, _EYES[eye]) for colour in curves.COLOURS.values()]
    assert min(np.linalg.norm(first - second) for first, second in combinations(seen, 2)) > 20
    assert min(np.linalg.norm(first - second) for first, second in pairwise(seen)) > 30


def test_a_sample_that_missed_the_peak_is_shown_with_the_true_one() -> None:
    seen = forecast()
    planned = forecast(
        phases={**seen.phases, "backward": {**seen.phases["backward"], "allocated_bytes": 5888 * MIB}},
        categories={**seen.categories, "activations": 2304 * MIB, "allocator_slack": 256 * MIB},
        peak_allocated_bytes=5888 * MIB,
    )
    axes = axes_of(planned)
    assert "peak 6.75 GiB" in texts(axes)
    assert "activations, 2.25 GiB" in legend(axes)


def test_the_peak_is_marked_where_most_tensors_are_alive() -> None:
    axes = axes_of(forecast())
    (marker,) = [line for line in axes.lines if line.get_marker() == "o"]
    (x,), (y,) = marker.get_data()
    left, right = [column[0] for column in outline(axes.collections[0])][2:4]
    assert left < x < right
    assert y == pytest.approx(6.5)
    assert "peak 6.50 GiB" in texts(axes)


@pytest.mark.parametrize(
    ("budget", "lines", "text", "top", "title"),
    [
        (12 * GIB, [12], "budget 12.00 GiB", (12, 14), "fits: 7.00 of 12.00 GiB"),
        (22 * GIB, [], "budget 22.00 GiB, more than 3 times what is shown", (7, 9), "fits: 7.00 of 22.00 GiB"),
        (7 * GIB, [7], "budget 7.00 GiB", (7, 9), "fits: 7.00 of 7.00 GiB"),
        (2 * GIB, [2], "budget 2.00 GiB", (7, 9), "does NOT fit: 7.00 of 2.00 GiB"),
        (512 * MIB, [0.5], "budget 512 MiB", (7, 9), "does NOT fit: 7.00 GiB of 512 MiB"),
    ],
)  # fmt: skip
def test_the_budget_is_a_line_unless_it_is_far_above_the_need_and_the_title_is_the_answer(
    budget: int, lines: list[float], text: str, top: tuple[float, float], title: str
) -> None:
    figure = plots.forecast_figure(forecast(budget=budget))
    (axes,) = figure.axes
    assert budget_lines(axes) == lines
    assert text in texts(axes)
    assert top[0] < axes.get_ylim()[1] < top[1]
    too_much = f", {(7 * GIB - budget) / GIB:.2f} GiB too much" if budget < 7 * GIB else ""
    assert figure.get_suptitle() == f"{title} on RTX 3090{too_much}; 4 rows x 2,048 tokens, padded"


def test_a_long_device_name_does_not_overflow_the_plot() -> None:
    figure = plots.forecast_figure(forecast(name="a card with a name that is as long as $names of cards$ can get " * 2))
    figure.canvas.draw()
    (title,) = figure.texts
    assert title.get_window_extent().x1 < figure.bbox.x1


def test_phases_are_named_under_their_part_of_the_axis() -> None:
    axes = axes_of(forecast())
    assert [label.get_text() for label in axes.get_xticklabels()] == ["forward", "backward", "optimizer"]
    edges = [column[0] for column in outline(axes.collections[0])]
    assert list(axes.get_xticks()) == pytest.approx(
        [(edges[0] + edges[2]) / 2, (edges[2] + edges[4]) / 2, (edges[4] + 1) / 2]
    )


def test_a_phase_of_few_points_keeps_room_for_its_name() -> None:
    seen = forecast()
    figure = plots.forecast_figure(
        dataclasses.replace(seen, curve=seen.curve[:2] * 100 + seen.curve[2:4] * 100 + seen.curve[4:])
    )
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert boxes[-1].x1 <= axes.bbox.x1
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_reserved_memory_is_a_line_above_the_tensors_and_none_on_a_cpu() -> None:
    (line,) = [line for line in axes_of(forecast()).lines if "reserved" in str(line.get_label())]
    assert list(line.get_ydata()) == [7] * 6
    assert not any("reserved" in name for name in legend(axes_of(forecast(type="cpu"))))


def test_the_label_of_the_peak_is_below_a_line_of_reserved_memory_close_above_it() -> None:
    seen = forecast()
    curve = tuple(dataclasses.replace(point, reserved_bytes=5664 * MIB) for point in seen.curve)
    figure = plots.forecast_figure(dataclasses.replace(seen, curve=curve))
    figure.canvas.draw()
    (axes,) = figure.axes
    (label,) = [text for text in axes.texts if text.get_text() == "peak 6.50 GiB"]
    assert label.get_window_extent().y1 < axes.transData.transform((0, (5664 + 1024) / 1024))[1]


def test_a_peak_outside_the_step_is_noted() -> None:
    seen = forecast()
    phases = {**seen.phases, "evaluation": {"allocated_bytes": 6 * GIB, "reserved_bytes": 8 * GIB}}
    planned = dataclasses.replace(seen, phases=phases, peak_allocated_bytes=6 * GIB, peak_reserved_bytes=8 * GIB)
    assert "the most, 9.00 GiB, is needed outside the step: evaluation" in axes_of(planned).get_xlabel()
    assert "outside" not in axes_of(seen).get_xlabel()


def test_small_jobs_are_drawn_in_mib() -> None:
    seen = forecast(type="cpu")
    small = dataclasses.replace(
        seen,
        device=dataclasses.replace(seen.device, outside_bytes=GIB // 16),
        peak_allocated_bytes=seen.peak_allocated_bytes // 16,
        peak_reserved_bytes=seen.peak_reserved_bytes // 16,
        phases={phase: {name: size // 16 for name, size in sizes.items()} for phase, sizes in seen.phases.items()},
        categories={category: size // 16 for category, size in seen.categories.items()},
        curve=tuple(
            dataclasses.replace(point, categories={name: size // 16 for name, size in point.categories.items()})
            for point in seen.curve
        ),
    )
    axes = axes_of(small)
    assert axes.get_ylabel() == "memory (MiB)"
    assert [top for _, _, top in outline(axes.collections[-1])] == pytest.approx([64 * top for top in _TOPS])
    assert "peak 416 MiB" in texts(axes)
    assert axes_of(seen).get_ylabel() == "memory (GiB)"


def test_a_png_is_the_same_every_time_and_says_so_without_a_curve() -> None:
    assert texts(axes_of(forecast(curve=()))) == ["no step was traced"]
    image = plots.forecast(forecast())
    assert image == plots.forecast(forecast())
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
