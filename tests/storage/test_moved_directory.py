"""A directory that is held and was moved, with another in its place: that one stays as it is, whatever is written.

Whole runs are in tests/faults/test_moved_run.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from finetune.errors import MachineError
from finetune.storage import checkpoint, files
from finetune.storage.checkpoint import Contents
from finetune.storage.files import append_line, dispose, staged, write_text
from finetune.storage.rundir import RunDirectory

MOVED = "no longer the directory"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run").mkdir()
    with files.held(tmp_path / "run"):
        yield tmp_path / "run"


def move(folder: Path) -> None:
    """Put one in its place that is writing the same files at this moment."""
    folder.rename(folder.with_name("moved"))
    for name in ("adapter/weights", "adapter.incomplete/weights", "latest", "latest.incomplete", "events.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of the other\n")


def assert_untouched(folder: Path) -> None:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    assert sorted(found) == ["adapter.incomplete/weights", "adapter/weights", "events.jsonl", "latest",
                             "latest.incomplete"]  # fmt: skip
    assert all(path.read_text() == f"{name} of the other\n" for name, path in found.items())
    assert not (folder / "checkpoints").exists()


def stage(folder: Path) -> None:
    with staged(folder / "adapter"):
        pass


WRITES: dict[str, Callable[[Path], object]] = {
    "a new file of lines": lambda folder: append_line(folder / "metrics.jsonl", {}),
    "a file": lambda folder: write_text(folder / "latest", "mine"),
    "a directory": stage,
    "a removal": lambda folder: dispose(folder / "adapter"),
    "a checkpoint": lambda folder: checkpoint.write(RunDirectory(folder), Contents(1, {}, {}, {})),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_no_write_starts_in_a_moved_directory(folder: Path, write: Callable[[Path], object]) -> None:
    move(folder)
    with pytest.raises(MachineError, match=MOVED):
        write(folder)
    assert_untouched(folder)


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_staged_directory_is_neither_published_nor_removed_in_another_run(
    folder: Path, error: type[Exception] | None
) -> None:
    def write() -> None:
        with staged(folder / "adapter"):
            move(folder)
            if error:
                raise error

    with pytest.raises(MachineError, match=MOVED):
        write()
    assert_untouched(folder)


def test_a_partial_file_is_neither_published_nor_removed_in_another_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: move(folder))
    with pytest.raises(MachineError, match=MOVED):
        write_text(folder / "latest", "mine")
    assert_untouched(folder)


def test_a_line_is_not_appended_to_a_file_of_another_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Path, mode: str) -> IO[bytes]:
        move(folder)
        return open(path, mode)

    monkeypatch.setattr(files, "open", opened, raising=False)
    with pytest.raises(MachineError, match=MOVED):
        append_line(folder / "events.jsonl", {})
    assert_untouched(folder)
