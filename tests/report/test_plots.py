"""A plot comes out of every run, however short."""

from __future__ import annotations

import math

import pytest
from report_lines import evaluation_line, training_line, write_lines

from finetune.report import plots
from finetune.storage.rundir import RunDirectory


@pytest.mark.parametrize("steps", [0, 1, 60])
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_run_of_any_length_gives_a_png(empty_run: RunDirectory, steps: int, evaluated: bool) -> None:
    if evaluated:
        write_lines(empty_run, evaluation_line(0, 4.0))
    for step in range(1, steps + 1):
        write_lines(empty_run, training_line(step, 4 / math.sqrt(step), forward=800, backward=900, optimizer=850))
    written = plots.training(empty_run)
    assert written == empty_run.plot_file
    assert written.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_losses_that_are_not_finite_leave_a_gap_in_the_plot(empty_run: RunDirectory) -> None:
    write_lines(empty_run, evaluation_line(0, None), training_line(1, None, forward=800))
    assert plots.training(empty_run).stat().st_size > 0


def test_the_same_run_gives_the_same_bytes(run: RunDirectory) -> None:
    first = plots.training(run).read_bytes()
    assert plots.training(run).read_bytes() == first
