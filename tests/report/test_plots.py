"""A plot comes out of every run, however short."""

from __future__ import annotations

import math

import pytest
from report_lines import evaluation_line, training_line, write_lines

from finetune.report import plots
from finetune.storage.rundir import RunDirectory


@pytest.mark.parametrize(("steps", "evaluated"), [(0, False), (1, False), (0, True), (60, True)])
def test_a_run_of_any_length_gives_a_png(empty_run: RunDirectory, steps: int, evaluated: bool) -> None:
    if evaluated:
        write_lines(empty_run, evaluation_line(0, 4.0))
    for step in range(1, steps + 1):  # a loss that is not finite leaves a gap
        loss = None if step == 1 else 4 / math.sqrt(step)
        write_lines(empty_run, training_line(step, loss, forward=800, backward=900, optimizer=850))
    written = plots.training(empty_run)
    assert written == empty_run.plot_file
    first = written.read_bytes()
    assert first.startswith(b"\x89PNG\r\n\x1a\n")
    if steps == 60:
        assert plots.training(empty_run).read_bytes() == first
