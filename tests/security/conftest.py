"""Foreign files to be refused, made when a test needs them; and the trap that shows whether anything ran."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
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
def base(foreign: Path, shallow_base: Path) -> Path:
    """A model directory to spoil."""
    return Path(shutil.copytree(shallow_base, foreign / "base"))


@pytest.fixture
def run(foreign: Path, trained: RunDirectory) -> RunDirectory:
    """A finished run to spoil."""
    return RunDirectory(shutil.copytree(trained.path, foreign / "run"))


@pytest.fixture
def call_each(tmp_path: Path, foreign: Path, trap: Trap) -> Callable[..., list[Ended]]:
    """Run commands in a watched child. They may write below `writes` (default `out`), nothing may run, nothing may
    connect, and the foreign files must be as before, but for a run directory that they may write to."""

    def run(*commands: Sequence[object], writes: Path | None = None) -> list[Ended]:
        mine = writes or tmp_path / "out"
        before = contents(tmp_path, mine)
        ended = watched(*commands, writable=[mine], foreign=[foreign], folder=tmp_path)
        assert [(arguments, one.heard) for arguments, one in zip(commands, ended, strict=True) if one.heard] == []
        assert not trap.went_off
        assert contents(tmp_path, mine) == before
        return ended

    return run


@pytest.fixture
def call(call_each: Callable[..., list[Ended]]) -> Callable[..., Ended]:
    """Run one."""
    return lambda *arguments, **given: call_each(arguments, **given)[0]


@pytest.fixture
def training(rows_file: Path, shallow_base: Path, tmp_path: Path) -> list[str]:
    """Overrides of a job of one step on two layers."""
    return [
        f"model.name={shallow_base}", "training.max_steps=1", "training.batch_size=2", "training.micro_batch=2",
        "memory.check=off", "output.merge=false", f"data.train={rows_file}", "data.eval=none",
        f"output.dir={tmp_path / 'out' / 'run'}",
    ]  # fmt: skip


@pytest.fixture
def train(call: Callable[..., Ended], training: list[str]) -> Callable[..., Ended]:
    """Train it, with overrides."""

    def run(*overrides: str, config: Path = TINY, writes: Path | None = None) -> Ended:
        return call("train", config, *training, *overrides, writes=writes)

    return run


def contents(folder: Path, but: Path) -> dict[str, Any]:
    """Every path below `folder`, with size and time of change, except below `but`."""
    found = (path for path in folder.rglob("*") if not path.is_relative_to(but))
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in found if not path.is_dir()}
