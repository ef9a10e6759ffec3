"""A small run written by hand: every number that a test expects can be read here."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_lines import MIB, evaluation_line, training_line, write_lines

from finetune.config import Config
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory


@pytest.fixture
def empty_run(tmp_path: Path) -> RunDirectory:
    """A run that was opened and has not taken a step."""
    run = RunDirectory(tmp_path / "small")
    run.create(Config())
    return run


@pytest.fixture
def run(empty_run: RunDirectory) -> RunDirectory:
    """Three steps, the best held-out loss at the second, whose weights were published."""
    run = empty_run
    run.event("started", seed=42)
    write_lines(
        run,
        evaluation_line(0, 4.0),
        training_line(1, 3.5, forward=800, backward=900, optimizer=850),
        training_line(2, 2.5, forward=810, backward=950, optimizer=840),
        evaluation_line(2, 3.0, 720),
        training_line(3, 2.0, forward=805, backward=940, optimizer=845),
        evaluation_line(3, 3.5),
    )
    run.event("saved", step=3, seconds=0.25, memory={"resident_bytes": 600 * MIB})
    run.event("best_loaded", step=2)
    run.event("trained", step=3, best_step=2, memory={"load": {"resident_bytes": 2048 * MIB}})
    run.event("finished", step=3, best_step=2)
    answer = {"question": "What is <b>x</b>?", "reference": "A name.", "before": "[/red]"}
    write_json(run.answers_file, [answer | {"after": "<script>alert(1)</script>"}])
    write_json(run.environment_file, {"python": "3.11", "device": {"type": "cpu"}, "cpu_cores": 2, "threads": 2})
    run.adapter.mkdir()
    return run
