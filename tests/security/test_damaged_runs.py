"""A run whose files are damaged, of another job, or not finished: it trains on, or says which file does not fit."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import QUICK, TINY
from signed import sign

import finetune
from finetune import cli
from finetune.choices import load_config
from finetune.config import Config
from finetune.errors import ArtifactError
from finetune.storage.files import write_lines
from finetune.storage.rundir import RunDirectory
from finetune.training import sample_answers


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, shallow_base: Path) -> RunDirectory:
    """Two steps of a job of four. Do not write to it."""
    job = ["output.save_every=1", "training.max_steps=2", "output.best=false", f"data.train={rows_file}",
           f"model.name={shallow_base}"]  # fmt: skip
    directory = tmp_path_factory.mktemp("half") / "run"
    return finetune.train(load_config(TINY, [*QUICK, *job, "data.eval_share=0.2", f"output.dir={directory}"])).run


@pytest.fixture
def unfinished(half: RunDirectory, tmp_path: Path, hurried: None, unwarmed: None) -> Config:
    """The job of four steps, two of which are done."""
    directory = shutil.copytree(half.path, tmp_path / "run")
    return half.config().changed({"training.max_steps": 4, "output.dir": str(directory)})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[", marks=pytest.mark.long),
        '[{"question": "x", "reference": "y", "before": "z", "after": null, "messages": [{"role": 3}]}]',
    ],
)
def test_damaged_answers_do_not_stop_training_and_are_generated_again(
    unfinished: Config, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(unfinished.output.dir)
    before = run.answers()
    run.answers_file.write_text(text)
    monkeypatch.setattr(sample_answers, "QUESTIONS", len(before))
    assert finetune.train(unfinished).run.steps_done == 4
    assert [(row["question"], row["before"]) for row in run.answers()] == [
        (row["question"], row["before"]) for row in before
    ]
    assert all(row["after"] is not None for row in run.answers())


STATES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "of another step": lambda state, progress: progress.update(global_step=3),
    "of another schedule": lambda state, progress: state["schedule"].update(step=3),
    "without generators": lambda state, progress: state.pop("random"),
    "without parameters": lambda state, progress: state["optimizer"]["groups"][0].update(params=[]),
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_that_does_not_fit_is_refused_before_the_first_step(unfinished: Config, what: str) -> None:
    run = RunDirectory(unfinished.output.dir)
    older, newest = run.complete_checkpoints()
    shutil.rmtree(older)
    files = [newest / "state.json", newest / "trainer_state.json"]
    values = [json.loads(file.read_bytes()) for file in files]
    STATES[what](*values)
    for file, value in zip(files, values, strict=True):
        file.write_text(json.dumps(value))
    sign(newest)
    with pytest.raises(ArtifactError, match=newest.name):
        finetune.train(unfinished)
    assert max(line["step"] for line in run.metrics()) == 2


def test_the_report_of_an_unfinished_run_is_marked_unfinished(
    run: RunDirectory, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not finished" not in run.report_file.read_text()
    rows = [{**row, "after": None} for row in run.answers()]
    run.answers_file.write_text(json.dumps(rows))
    write_lines(run.events_file, run.events()[:1])
    for path in (run.adapter, run.merged, run.checkpoints):
        shutil.rmtree(path, ignore_errors=True)
    for metrics in ("", run.metrics_file.read_text()):
        run.metrics_file.write_text(metrics)
        monkeypatch.setattr(sys, "argv", ["finetune", "report", str(run.path)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        out, err = capsys.readouterr()
        assert out == f"{run.report_file}\n"
        assert "is not finished" in err
        page_text = run.report_file.read_text()
        assert "not finished" in page_text
        assert "before training" in page_text
        assert "after training" not in page_text
