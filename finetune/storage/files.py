"""Atomic writes, so that nothing looks finished early: files and directories are replaced as a whole, lines appended.

A directory that is held, like that of a run in training, is written only while it is still at its path.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import MachineError

_PARTIAL = ".incomplete"
_REPLACED = ".replaced"

# The directories that this process writes, by the descriptors that say which ones they are.
_HELD: dict[int, Path] = {}


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Within the block writes below `folder` raise MachineError once another directory stands in its place."""
    # Open, so that the file system cannot give its number to another one.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    _HELD[descriptor] = folder
    try:
        yield
    finally:
        del _HELD[descriptor]
        os.close(descriptor)


def refuse_another(path: Path) -> None:
    """Raise MachineError where `path` lies below a directory that is held and no longer stands in its place.

    So it is when a run is renamed while it trains, perhaps with another one started under its name.
    """
    for descriptor, folder in list(_HELD.items()):
        with contextlib.suppress(FileNotFoundError):
            if not path.is_relative_to(folder) or os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                continue
        raise MachineError(
            f"{folder} is no longer the directory that this run was started in, which was moved, replaced or "
            "removed while it trained; nothing is written there. What was saved is where that one is now: start "
            "the command again with `output.dir` set to it"
        )


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Write a directory under a temporary name and publish it by rename when the block ends without an error.

    An earlier `target` is replaced only then. Files and directory are fsynced before the rename, so that the name never
    points to less than what was written.
    """
    refuse_another(target)
    _put_back(target)
    partial = target.with_name(target.name + _PARTIAL)
    _remove(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _fsync(path)
        refuse_another(target)
        _publish(partial, target)
    except BaseException:
        refuse_another(target)
        _remove(partial)  # a full disk needs the room for the line that says so
        raise


def _publish(partial: Path, target: Path) -> None:
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    _fsync(target.parent)
    _remove(replaced)


def _put_back(target: Path) -> None:
    """Undo or finish a replacement of `target` that was cut short between its two renames."""
    replaced = target.with_name(target.name + _REPLACED)
    if replaced.exists():
        if target.exists():
            _remove(replaced)
        else:
            replaced.rename(target)


def dispose(folder: Path) -> None:
    """Remove a directory so that a kill on the way leaves no half of it under its name."""
    refuse_another(folder)
    partial = folder.with_name(folder.name + _PARTIAL)
    _remove(partial)
    _remove(folder.rename(partial))


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill left half-written in `folder`, and put back what it left half-replaced."""
    for replaced in folder.glob("*" + _REPLACED):
        _put_back(replaced.with_suffix(""))
    for partial in folder.glob("*" + _PARTIAL):
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file as a whole: what is there changes only once all of `content` is on disk.

    A device or pipe is written to as it is. Raises MachineError where the disk does not take it, and leaves nothing.
    """
    refuse_another(path)
    partial = path.with_name(path.name + _PARTIAL)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        refuse_another(path)
        os.replace(partial, path)
    except BaseException as error:
        refuse_another(path)
        with contextlib.suppress(OSError):
            _remove(partial)
        if isinstance(error, OSError):
            raise MachineError(not_written(path, error)) from None
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """Replace a .jsonl file as a whole; see `write_bytes`."""
    write_text(path, "".join(json.dumps(value) + "\n" for value in values))


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Add one line. Raises MachineError where the disk does not take it."""
    refuse_another(path)
    try:
        with open(path, "a+b") as file:
            torn = ""
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = "\n" if file.read(1) != b"\n" else ""
            refuse_another(path)  # once more: what was opened may be another's by now
            file.write((torn + json.dumps(value) + "\n").encode())
    except OSError as error:
        raise MachineError(not_written(path, error)) from None


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)
"""errno values of a disk that is full, failing, or not ours to write."""


def not_written(path: Path, error: Exception) -> str:
    """The message for a write that failed: the file, why, the room left, and what to do."""
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free"
    except OSError:
        free = "its directory is not there"
    why = getattr(error, "strerror", None) or error
    return (
        f"{path} could not be written: {why}; {free}. What was there before is untouched: make room, or choose another "
        "place (a run's is `output.dir`), and start the same command again"
    )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
