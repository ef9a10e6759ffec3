"""Atomic writes: directories and files are replaced by a rename, so no partial one looks complete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.errors import MachineError

_PARTIAL = ".incomplete"
_REPLACED = ".replaced"
_MADE_FROM = "made_from.json"


@contextlib.contextmanager
def staged(target: Path, made_from: dict[str, Any] | None = None) -> Iterator[Path]:
    """Write a directory under a temporary name and publish it by rename when the block ends without an error.

    Only then is an earlier `target` replaced. Files and directory are fsynced before the rename, so `target` never
    refers to incomplete data. With `made_from` (JSON values), the folder of a process that was killed or interrupted
    with the same values is reused: the block completes it.
    """
    _put_back(target)
    partial = target.with_name(target.name + _PARTIAL)
    interrupted = None  # what a block that was interrupted was making
    if made_from is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            interrupted = json.loads((partial / _MADE_FROM).read_text(encoding="utf-8"))
    if made_from is None or interrupted != made_from:
        _remove(partial)
        partial.mkdir(parents=True)
    try:
        if made_from is not None:
            (partial / _MADE_FROM).write_text(json.dumps(made_from), encoding="utf-8")
        yield partial
        (partial / _MADE_FROM).unlink(missing_ok=True)
        publish(partial, target)
    except BaseException as error:
        if made_from is None or isinstance(error, Exception):
            _remove(partial)  # on a full disk this frees space to log the failure
        raise


def publish(partial: Path, target: Path) -> None:
    """Rename a directory to `target`, once it is on the disk, and remove an earlier `target`. Raises OSError."""
    flush(partial)
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


def flush(folder: Path) -> None:
    """Bring a folder and all that is in it to the disk. Raises OSError."""
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _put_back(target: Path) -> None:
    """Undo or finish a replacement of `target` that was interrupted between its two renames."""
    replaced = target.with_name(target.name + _REPLACED)
    if replaced.exists() and target.exists():
        _remove(replaced)
    elif replaced.exists():
        replaced.rename(target)


def dispose(folder: Path) -> None:
    """Remove a directory such that a kill midway leaves nothing incomplete under its name."""
    partial = folder.with_name(folder.name + _PARTIAL)
    _remove(partial)
    _remove(folder.rename(partial))


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill left half-written in `folder`, and restore what it left half-replaced."""
    for replaced in folder.glob("*" + _REPLACED):
        _put_back(replaced.with_suffix(""))
    for partial in folder.glob("*" + _PARTIAL):
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Raise MachineError, before long work, for a file to write that is a folder or in none."""
    if path.is_dir():
        raise MachineError(f"{path} could not be written: it is a folder; name a file")
    try:
        os.stat(os.path.join(path.parent, ""))
    except OSError as error:
        raise MachineError(not_written(path, error)) from None


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically, through a temporary one that is fsynced. Raises MachineError if writing fails."""
    check_place(path)
    partial = path.with_name(path.name + _PARTIAL)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        _remove(partial)
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _remove(partial)
        if isinstance(error, OSError):
            raise MachineError(not_written(path, error)) from None
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically by JSON; `value` may contain dataclasses."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, default=asdict) + "\n")


def write_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """Replace a .jsonl file atomically; see `write_bytes`."""
    write_text(path, "".join(json.dumps(value) + "\n" for value in values))


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one line. Raises MachineError if writing fails."""
    try:
        with open(path, "a+b") as file:
            torn = ""
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = "\n" if file.read(1) != b"\n" else ""
            file.write((torn + json.dumps(value) + "\n").encode())
    except OSError as error:
        raise MachineError(not_written(path, error)) from None


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)
"""errno values of a disk that is full, failing or not writable."""

_REMEDIES = {
    errno.EROFS: "make its file system writable",
    errno.EACCES: "get the permission to write there",
    errno.EPERM: "get the permission to write there",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`)",
    errno.EIO: "check its disk, which fails",
    errno.ENOENT: "create its directory",
    errno.ENOTDIR: "remove the file that is in the place of a directory",
    errno.EEXIST: "remove the file that is in the place of a directory",
}


def not_written(path: Path, error: Exception) -> str:
    """The message for a failed write: the file, the reason, and what to do."""
    return (
        f"{path} could not be written: {cause(error, path.parent)}. What was there before is untouched: "
        f"{remedy(error)}, or choose another location (`output.dir` for a run), and run the same command again"
    )


def cause(error: Exception, folder: Path) -> str:
    """The reason for a failed write to `folder`, with its free space if the lack of it may be the reason."""
    why = str(getattr(error, "strerror", None) or error)
    try:
        disk = os.statvfs(folder)
    except OSError:
        return f"{why}; its directory does not exist"
    if _number(error) in _REMEDIES:
        return why
    if disk.f_files and not disk.f_favail:
        return f"{why}; the file system has no room for another file, however small (inodes)"
    return f"{why}; {disk.f_bavail * disk.f_frsize:,} bytes are free"


def remedy(error: Exception) -> str:
    """The remedy for a failed write, besides choosing another location."""
    number = _number(error)
    if number == errno.EDQUOT:
        return "free some space of your quota"
    return _REMEDIES.get(number, "free some space")


def _number(error: Exception) -> int:
    """The errno of an error, which safetensors 0.8 only puts in the text; 0 if there is none."""
    in_text = re.search(r"os error (\d+)", str(error))
    return getattr(error, "errno", None) or (int(in_text[1]) if in_text else 0)


def amount(count: int) -> str:
    """A size for messages: in GiB, or in bytes below 1 GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count:,} bytes"


@contextlib.contextmanager
def as_os_errors(folder: Path) -> Iterator[None]:
    """In the block, raise OSError for a failed write of which a library says only the number, in an error of its own.

    So does tokenizers 0.23 on a full disk, in a plain `Exception`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or not (number := _number(error)):
            raise
        raise OSError(number, os.strerror(number), str(folder)) from None


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
