"""A run directory that is renamed while its run trains, with another in its place: the first writes nothing there."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from children import Children, Fault
from jobs import QUICK

from finetune.errors import MachineError
from finetune.storage.files import append_line
from finetune.storage.rundir import RunDirectory

JOB = [*QUICK, "data.eval=none", "training.eval_every=null", "quantization.kind=none", "output.save_every=1"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(Fault("finetune.training.step:Step.clip", nth=3), id="step"),
        pytest.param(Fault("open", r"step-00000003\.incomplete/"), id="checkpoint", marks=pytest.mark.long),
        pytest.param(Fault("open", r"adapter\.incomplete/"), id="adapter"),
        pytest.param(Fault("open", r"merged\.incomplete/"), id="merge"),
        pytest.param(Fault("finetune.report.plots:training"), id="plot", marks=pytest.mark.long),
        pytest.param(Fault("finetune.report.page:write"), id="report", marks=pytest.mark.long),
        pytest.param(Fault("finetune.report.terminal:Terminal.finished"), id="the last event"),
    ],
)
def test_a_run_that_was_moved_while_it_trained_ends_in_4_and_leaves_the_one_in_its_place_alone(
    children: Children, rows_file: Path, tmp_path: Path, moment: Fault
) -> None:
    run, moved = RunDirectory(tmp_path / "run"), tmp_path / "moved"
    command = ["train", children.config, *JOB, f"data.train={rows_file}", f"output.dir={run.path}", "output.merge=true"]
    child = children.start(command, Fault(moment.event, moment.path, moment.nth, "SIGSTOP"))
    child.wait_until_stopped()
    run.path.rename(moved)
    # What a run of the same job has written by now, under the same names.
    shutil.copytree(moved, run.path, ignore=shutil.ignore_patterns("*.incomplete"))
    before = files(run.path)
    child.send(signal.SIGCONT)
    ended = child.wait()
    if moment.event.endswith("finished"):
        assert ended.code == 0, ended.output
    else:
        assert ended.code == 4, ended.output
        assert f"{run.path} is no longer the directory that" in " ".join(ended.output.split())
    assert "Traceback" not in ended.output
    assert files(run.path) == before


def test_a_directory_of_the_same_number_on_disk_is_not_taken_for_the_one_that_was_removed(tmp_path: Path) -> None:
    """File systems give the number of a removed directory to the next one; not while it is held."""
    run = RunDirectory(tmp_path / "run")
    run.claim()
    with run.held():
        run.event("one")
        for _ in range(20):
            shutil.rmtree(run.path)
            run.claim()
            with pytest.raises(MachineError, match="no longer the directory"):
                append_line(run.events_file, {})
        assert run.events() == []


def test_a_link_to_the_run_may_be_given_as_its_directory(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    run.claim()
    with run.locked():
        run.event("one")
        os.rename(tmp_path / "disk", tmp_path / "old")
        (tmp_path / "disk").mkdir()
        with pytest.raises(MachineError, match="no longer the directory"):
            run.event("two")
