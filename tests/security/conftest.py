"""Foreign files to be refused, made when a test needs them; and the trap that shows whether anything ran."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import TINY, Trap
from watched import Ended, watched

import finetune.recipe  # noqa: F401 -- with all that it imports, so that no fork has to
from finetune.storage.rundir import RunDirectory


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The folder that the foreign files of a test stand in."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    return folder


@pytest.fixture
def base(foreign: Path, tiny_base: Path) -> Path:
    """A model directory to spoil."""
    return Path(shutil.copytree(tiny_base, foreign / "base"))


@pytest.fixture
def run(foreign: Path, trained: RunDirectory) -> RunDirectory:
    """A finished run to spoil."""
    return RunDirectory(shutil.copytree(trained.path, foreign / "run"))


@pytest.fixture
def call(tmp_path: Path, foreign: Path, trap: Trap) -> Callable[..., Ended]:
    """Run a command in a watched child. It may write below `writes` (default `out`), nothing may run, nothing may
    connect, and the foreign files must be as before, but for a run directory that it may write to."""

    def run(*arguments: object, writes: Path | None = None) -> Ended:
        mine = writes or tmp_path / "out"
        before = contents(tmp_path, mine)
        ended = watched(*arguments, writable=[mine], foreign=[foreign], folder=tmp_path)
        assert ended.heard == []
        assert not trap.went_off
        assert contents(tmp_path, mine) == before
        return ended

    return run


@pytest.fixture
def train(call: Callable[..., Ended], rows_file: Path, shallow_base: Path, tmp_path: Path) -> Callable[..., Ended]:
    """Train two layers for one step, with overrides."""

    def run(*overrides: str, config: Path = TINY, writes: Path | None = None) -> Ended:
        job = [
            f"model.name={shallow_base}",
            "training.max_steps=1",
            "training.batch_size=2",
            "training.micro_batch=2",
            "memory.check=off",
        ]
        job.append("output.merge=false")
        where = [f"data.train={rows_file}", "data.eval=none", f"output.dir={tmp_path / 'out' / 'run'}"]
        return call("train", config, *job, *where, *overrides, writes=writes)

    return run


def contents(folder: Path, but: Path) -> dict[str, Any]:
    """Every path below `folder`, with size and time of change, except below `but`."""
    found = (path for path in folder.rglob("*") if not path.is_relative_to(but))
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in found if not path.is_dir()}
