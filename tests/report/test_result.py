"""The numbers of a run are those of its lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from messages import refusal
from report_lines import MIB, evaluation_line, training_line, write_lines
from rich.console import Console

from finetune.errors import MachineError
from finetune.report.curves import smoothed
from finetune.report.figures import Figures
from finetune.report.result import Result
from finetune.storage.rundir import RunDirectory


def test_summary_has_the_numbers_of_the_lines(run: RunDirectory) -> None:
    summary = Result(run).summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    seconds = Figures.read(run).seconds
    peaks = {"load": 2048, "forward": 810, "backward": 950, "optimizer": 850, "evaluation": 720, "save": 600}
    assert summary == {
        "run": str(run.path), "steps": 3, "final_train_loss": 2.0, "base_eval_loss": 4.0, "final_eval_loss": 3.5,
        "best_eval_loss": 3.0, "best_step": 2, "exported_step": 2, "exported_eval_loss": 3.0, "relative_drop": 0.25,
        "peaks": {phase: {"resident_bytes": size * MIB} for phase, size in peaks.items()},
        "peak_bytes": 2048 * MIB, "tokens_per_second": 2000.0, "seconds": seconds, "device_hours": seconds / 3600,
        "padding_share": pytest.approx(1 / 7),  # 100 + 200 + 300 tokens in 200 + 200 + 300 places
        "adapter": str(run.adapter), "merged": None, "report": None, "plot": None,
    }  # fmt: skip


def test_summary_of_a_run_without_lines_is_empty(empty_run: RunDirectory) -> None:
    summary = Result(empty_run).summary()
    assert summary.pop("run") == str(empty_run.path)
    assert summary.pop("steps") == summary.pop("seconds") == summary.pop("device_hours") == 0
    assert summary.pop("peaks") == {}
    assert set(summary.values()) == {None}


def test_losses_of_a_run_that_was_not_evaluated_after_a_step_or_not_finite_are_none(empty_run: RunDirectory) -> None:
    write_lines(empty_run, evaluation_line(0, 4.0), training_line(1, None))
    assert Result(empty_run).summary()["relative_drop"] is None
    write_lines(empty_run, evaluation_line(1, None))
    summary = Result(empty_run).summary()
    assert (summary["final_train_loss"], summary["final_eval_loss"], summary["relative_drop"]) == (None, None, None)
    assert (summary["best_eval_loss"], summary["best_step"]) == (4.0, 0)


def test_published_are_the_weights_of_the_last_start_and_have_a_loss_if_they_were_evaluated(run: RunDirectory) -> None:
    def published() -> list[Any]:
        summary = Result(run).summary()
        return [summary[key] for key in ("exported_step", "exported_eval_loss", "relative_drop")]

    run.event("resumed", step=3)
    assert published() == [None, 3.5, 0.125], "of the last evaluation until weights are published"
    run.event("trained", step=3, memory={})
    assert published() == [3, 3.5, 0.125], "though a start before had loaded its best"
    write_lines(run, training_line(4, 1.0))
    run.event("trained", step=4, best_step=2, memory={})
    assert published() == [4, None, None]


def lines_of(show: Callable[[Console], None], width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        show(console)
    return [" ".join(line.replace("│", " ").split()) for line in captured.get().splitlines()]


def test_a_result_has_its_losses_a_row_for_each_phase_and_units_people_read(run: RunDirectory) -> None:
    result = Result(run)
    phases = lines_of(lambda console: console.print(result.table()))
    assert {"load 2.00 GiB", "backward 950 MiB"} <= set(phases)
    lines = lines_of(result.show, 120)
    assert "training loss, first and last step 3.5000 → 2.0000 3 steps" in lines
    assert str(result).splitlines()[0].strip() == str(run.path)


def test_results_have_a_row_for_each_statistic_of_the_objective(empty_run: RunDirectory) -> None:
    first = {**training_line(1, 0.7), "rewards_margins": 0.1, "kl": None}
    write_lines(empty_run, first, {**training_line(2, 0.6), "rewards_margins": 0.3, "kl": None})
    lines = lines_of(Result(empty_run).show)
    assert "rewards margins 0.200 mean of the last 2 steps" in lines
    assert not any(line.startswith("kl") for line in lines)


def test_table_on_cuda_shows_allocated_reserved_and_device(empty_run: RunDirectory) -> None:
    line = training_line(1, 1.0)
    line["memory"] = {"forward": {"device_bytes": 3 * MIB, "allocated_bytes": MIB, "reserved_bytes": 2 * MIB}}
    write_lines(empty_run, line)
    table = Result(empty_run).table()
    assert [column.header for column in table.columns] == ["phase", "allocated", "reserved", "device"]
    assert [next(column.cells) for column in table.columns] == ["forward", "1 MiB", "2 MiB", "3 MiB"]


def test_smoothing_takes_the_steps_around_and_leaves_out_a_nan() -> None:
    nan = float("nan")

    def of_losses(*losses: float | None) -> tuple[list[float], int]:
        return smoothed([[{"loss": loss}] for loss in losses])

    assert of_losses(4.0, 2.0, 3.0, nan, 1.0) == ([3.0, 3.0, 2.5, 2.0, 2.0], 5)
    assert of_losses(None, nan, None, 1.0)[0] == pytest.approx([nan, 1.0, 1.0, 1.0], nan_ok=True)


def test_a_frame_has_a_row_a_step_and_flat_columns(run: RunDirectory) -> None:
    frame = Result(run).frame()
    assert list(frame["step"]) == [0, 1, 2, 3]
    assert list(frame["loss"][1:]) == [3.5, 2.5, 2.0]
    assert list(frame["eval_loss"].dropna()) == [4.0, 3.0, 3.5]
    assert frame["memory.backward.resident_bytes"].max() == 950 * MIB
    assert not any(isinstance(value, dict) for value in frame.to_numpy().flat)


def test_a_frame_without_pandas_names_it(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refusal(MachineError, "pip install pandas"):
        Result(run).frame()
