"""The numbers of a run are those of its lines."""

from __future__ import annotations

import json
import sys

import pytest
from messages import refusal
from report_lines import MIB, evaluation_line, training_line, write_lines
from rich.console import Console

from finetune.errors import MachineError
from finetune.report.curves import smooth
from finetune.report.result import Result
from finetune.results.figures import Figures
from finetune.storage.rundir import RunDirectory


def test_summary_has_the_numbers_of_the_lines(run: RunDirectory) -> None:
    summary = Result(run).summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary == {
        "run": str(run.path),
        "steps": 3,
        "final_train_loss": 2.0,
        "base_eval_loss": 4.0,
        "final_eval_loss": 3.5,
        "best_eval_loss": 3.0,
        "best_step": 2,
        "exported_step": 2,
        "exported_eval_loss": 3.0,
        "relative_drop": 0.25,
        "peaks": {
            "load": {"resident_bytes": 2048 * MIB},
            "forward": {"resident_bytes": 810 * MIB},
            "backward": {"resident_bytes": 950 * MIB},
            "optimizer": {"resident_bytes": 850 * MIB},
            "evaluation": {"resident_bytes": 720 * MIB},
            "save": {"resident_bytes": 600 * MIB},
        },
        "tokens_per_second": 2000.0,
        "peak_bytes": 2048 * MIB,
        "seconds": Figures.read(run).seconds,
        "device_hours": Figures.read(run).seconds / 3600,
        # 100 + 200 + 300 tokens in 200 + 200 + 300 places
        "padding_share": pytest.approx(1 / 7),
        "adapter": str(run.adapter),
        "merged": None,
        "report": None,
        "plot": None,
    }


def test_summary_of_a_run_without_lines_is_empty(empty_run: RunDirectory) -> None:
    summary = Result(empty_run).summary()
    assert summary.pop("run") == str(empty_run.path)
    assert summary.pop("steps") == summary.pop("seconds") == summary.pop("device_hours") == 0
    assert summary.pop("peaks") == {}
    assert set(summary.values()) == {None}


def test_a_loss_that_was_not_finite_stays_none(empty_run: RunDirectory) -> None:
    write_lines(empty_run, evaluation_line(0, 4.0), training_line(1, None), evaluation_line(1, None))
    summary = Result(empty_run).summary()
    assert (summary["final_train_loss"], summary["final_eval_loss"], summary["relative_drop"]) == (None, None, None)
    assert (summary["best_eval_loss"], summary["best_step"]) == (4.0, 0)


def test_the_last_weights_are_published_where_a_start_before_the_last_loaded_its_best(run: RunDirectory) -> None:
    run.event("resumed", step=3)
    run.event("trained", step=3, memory={})
    assert Figures.read(run).exported_step == 3
    assert Result(run).summary()["relative_drop"] == 0.125


def test_published_weights_that_were_not_evaluated_have_no_loss(run: RunDirectory) -> None:
    run.event("resumed", step=3)
    write_lines(run, training_line(4, 1.0))
    run.event("trained", step=4, best_step=2, memory={})
    summary = Result(run).summary()
    assert (summary["exported_step"], summary["exported_eval_loss"], summary["relative_drop"]) == (4, None, None)


def test_before_publication_the_drop_is_computed_from_the_last_evaluation(run: RunDirectory) -> None:
    run.event("resumed", step=3)
    summary = Result(run).summary()
    assert (summary["exported_step"], summary["relative_drop"]) == (None, 0.125)


def test_a_run_that_was_never_evaluated_after_a_step_has_no_drop(empty_run: RunDirectory) -> None:
    write_lines(empty_run, evaluation_line(0, 4.0), training_line(1, 3.0))
    assert Result(empty_run).summary()["relative_drop"] is None


def test_table_has_a_row_for_each_phase_and_units_people_read(run: RunDirectory) -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(Result(run).table())
    lines = [line.replace("│", " ").split() for line in captured.get().splitlines()]
    assert ["load", "2.00", "GiB"] in lines
    assert ["backward", "950", "MiB"] in lines


def test_results_have_a_row_for_each_statistic_of_the_objective(empty_run: RunDirectory) -> None:
    first = {**training_line(1, 0.7), "rewards_margins": 0.1, "kl": None}
    write_lines(empty_run, first, {**training_line(2, 0.6), "rewards_margins": 0.3, "kl": None})
    console = Console(width=80)
    with console.capture() as captured:
        Result(empty_run).show(console)
    lines = [" ".join(line.replace("│", " ").split()) for line in captured.get().splitlines()]
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
    assert smooth([4.0, 2.0, 3.0, nan, 1.0], 3) == [3.0, 3.0, 2.5, 2.0, 1.0]
    assert smooth([nan, nan, nan, 1.0], 3) == pytest.approx([nan, nan, 1.0, 1.0], nan_ok=True)


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


def test_a_result_is_printed_with_its_losses(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = [line.replace("│", " ").split() for line in str(Result(run)).splitlines()]
    assert lines[0] == [str(run.path)]
    assert ["training", "loss,", "first", "and", "last", "step", "3.5000", "→", "2.0000", "3", "steps"] in lines
