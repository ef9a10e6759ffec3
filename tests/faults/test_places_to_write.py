"""Each command that writes, where it cannot: exit 4 with the path and the reason, and nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forecasts import forecast
from jobs import TINY, mounted
from messages import refusal
from safetensors import SafetensorError

import finetune
from finetune.config import Config
from finetune.errors import MachineError
from finetune.forecast.plan import Fitted
from finetune.resolve import planning
from finetune.resolve.planner import Planner
from finetune.storage.files import DISK_ERRORS, not_written, write_text
from finetune.storage.rundir import RunDirectory

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    yield from mounted(tmp_path / "disk", "16m")


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            pass


def protect(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(ended: tuple[int, str, str], path: Path, why: str) -> None:
    code, _, err = ended
    assert code == 4, err
    assert err.startswith(f"error: {path}")
    assert why in err
    assert REMEDY[why] in err
    assert ("free some space" in err) == (why == "No space left on device")


REMEDY = {
    "No space left on device": "bytes are free",
    "Read-only file system": "make its file system writable, or choose another location",
    "No such file": "its directory does not exist",
}

WRITERS = {"data": ["data", TINY, "--html"], "plan": ["plan", TINY, "--picture"]}


@pytest.mark.parametrize("command", WRITERS)
def test_a_file_asked_for_that_cannot_be_written(
    command: str, call: Call, disk: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "forecast", lambda *arguments, **named: forecast())
    small = [f"data.train={rows_file}", "data.eval_share=0.2",
             "data.max_length=32", "training.batch_size=2", "training.micro_batch=2"]  # fmt: skip
    arguments = [*WRITERS[command], disk / "made", *small]
    refused(call(*WRITERS[command], disk / "missing" / "made", *small), disk / "missing" / "made", "No such file")
    (disk / "made").write_text("mine")
    fill(disk)
    before = contents(disk)
    refused(call(*arguments), disk / "made", "No space left on device")
    protect(disk)
    refused(call(*arguments), disk / "made", "Read-only file system")
    refused(call(*WRITERS[command], "/dev/full", *small), Path("/dev/full"), "No space left on device")
    assert contents(disk) == before
    assert Path("/dev/full").is_char_device()


def test_a_fitted_config_that_cannot_be_written(disk: Path) -> None:
    """Without the fit before it, which takes most of a minute."""
    fitted = Fitted(Config(), forecast(), {}, tried=1, find_everything=forecast)
    with refusal(MachineError, "made could not be written: No such file"):
        planning.write(fitted, disk / "missing" / "made")
    fill(disk)
    with refusal(MachineError, "made could not be written: No space left on"):
        planning.write(fitted, disk / "made")
    assert sorted(os.listdir(disk)) == ["filler"]
    planning.write(fitted, Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("command", ["report", "merge"])
def test_a_run_that_cannot_be_written_to(command: str, call: Call, disk: Path, trained: RunDirectory) -> None:
    run = RunDirectory(shutil.copytree(trained.path, disk / "run"))
    run.lock_file.write_text("1\n")
    fill(disk)
    before = contents(disk)
    refused(call(command, run.path), run.path, "No space left on device")
    assert contents(disk) | {"run/lock": b""} == before | {"run/lock": b""}
    protect(disk)
    refused(call(command, run.path), run.path, "Read-only file system")
    assert contents(disk) | {"run/lock": b""} == before | {"run/lock": b""}


def test_scores_that_cannot_be_written_are_shown(call: Call, disk: Path, trained: RunDirectory) -> None:
    run = RunDirectory(shutil.copytree(trained.path, disk / "run"))
    fill(disk)
    code, out, err = call("eval", run.path, "--model", "base")
    assert code == 4
    assert err.startswith(f"error: {run.eval_file} could not be written: No space left on device")
    assert "perplexity" in out


def test_a_file_system_out_of_inodes_is_reported_as_such(disk: Path) -> None:
    """It has space, so that no one should be told to free some because of a number of bytes."""
    subprocess.run(["mount", "-o", "remount,nr_inodes=8", disk], check=True)
    with contextlib.suppress(OSError):
        for number in range(9):
            (disk / str(number)).touch()
    with refusal(MachineError) as error:
        write_text(disk / "one more", "")
    assert "bytes are free" not in str(error.value)


@pytest.mark.parametrize("number", [*DISK_ERRORS, errno.ENOENT])
def test_the_advice_about_a_disk_fits_its_error(number: int, tmp_path: Path) -> None:
    said = not_written(tmp_path / "file", OSError(number, os.strerror(number)))
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert os.strerror(number) in said
    assert ("free some space" in said, "bytes are free" in said) == (full, full)
    assert not_written(tmp_path / "file", SafetensorError(f"x: {os.strerror(number)} (os error {number})")).endswith(
        said.partition(". What was there")[2]
    )


def test_a_full_standard_output_is_reported(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "finetune", "schema"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (4, "error: the output: No space left on device\n")


# -- --fresh -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def earlier(quick, tmp_path: Path) -> Callable[[Path], Config]:
    """A function that puts a run of one step at a path; its config."""
    done = finetune.train(quick("training.max_steps=1", "data.eval=none", "training.eval_every=null")).run

    def make(place: Path) -> Config:
        shutil.copytree(done.path, place, dirs_exist_ok=True)
        return done.config().changed({"output.dir": str(place)})

    return make


def test_fresh_at_a_mount_point_or_under_a_name_that_cannot_grow_is_refused_and_moves_nothing(
    earlier, disk: Path, tmp_path: Path
) -> None:
    for place, why in ((disk, "busy"), (tmp_path / ("x" * 255), "too long")):
        config = earlier(place)
        before = contents(place)
        with refusal(MachineError, place, why):
            finetune.train(config, fresh=True)
        assert contents(place) | {"lock": b""} == before | {"lock": b""}
        assert finetune.train(config).run.finished


def test_fresh_through_a_link_moves_the_run_and_makes_the_new_one_where_it_was(earlier, tmp_path: Path) -> None:
    """The second time it takes a run away that lacks its config."""
    place, link = tmp_path / "elsewhere" / "place", tmp_path / "link"
    place.parent.mkdir()
    link.symlink_to(place)
    config = earlier(place).changed({"output.dir": str(link)})
    before = contents(place)
    for taken in (["place.1"], ["place.1", "place.2"]):
        run = finetune.train(config, fresh=True).run
        assert run.finished
        assert run.events()[0]["event"] == "started"
        assert sorted(os.listdir(place.parent)) == ["place", *taken]
        (place / "config.yaml").unlink()
    assert contents(place.with_name("place.1")) | {"lock": b""} == before | {"lock": b""}
    assert (place.with_name("place.2") / "adapter").is_dir()
