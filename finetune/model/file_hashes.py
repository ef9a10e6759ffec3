"""sha256 of large files, cached between starts: hashing a base of 13 GB takes some 10 to 30 seconds, once.

A hash is cached by the file's path, device, inode, size, mtime and ctime. The modification time alone can be reset by
anyone who may write to the file; the change time (ctime) cannot. The cache is one file of the user's, in the cache of
prepared data; deleting it only costs hashing again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from finetune.storage.private import cache_folder, not_private

_MEMORY = "file_hashes.json"
_MEMORY_BYTES = 2**24
# A file may change again within the same tick of its times, which a file system counts in up to 2 seconds.
_SETTLED_NANOSECONDS = 2 * 10**9
_writing = threading.Lock()


def memory() -> Path:
    """The file of remembered hashes, beside the prepared data."""
    return cache_folder() / _MEMORY


def sha256(file: Path) -> str:
    """sha256 in hex of a file's bytes, taken now or remembered. Raises OSError."""
    with open(file, "rb") as opened:
        now = time.time_ns()
        key, stamp = os.path.realpath(file), _stamp(os.fstat(opened.fileno()))
        if found := _remembered(key, stamp):
            return found
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        settled = now - max(stamp[-2:]) > _SETTLED_NANOSECONDS
        if settled and _stamp(os.fstat(opened.fileno())) == stamp:
            _remember(key, stamp, digest)
    return digest


def known(file: Path) -> bool:
    """Whether `sha256` would answer at once."""
    return _remembered(os.path.realpath(file), _stamp(os.stat(file))) is not None


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _remembered(key: str, stamp: list[int]) -> str | None:
    entry = _all().get(key)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(digest := entry.get("sha256"), str):
        return digest
    return None


def _all() -> dict[str, Any]:
    """What is remembered; nothing where the file is damaged, or where another user owns it or may write it."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if not_private(memory().parent):
            return {}
        descriptor = os.open(memory(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            status = os.fstat(descriptor)
            ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if ours and stat.S_ISREG(status.st_mode) and status.st_size <= _MEMORY_BYTES:
                found = json.loads(opened.read())
                return found if isinstance(found, dict) else {}
    return {}


def _remember(key: str, stamp: list[int], digest: str) -> None:
    """Add an entry, and drop those of files that are gone. A folder that cannot be written costs time alone."""
    with _writing, contextlib.suppress(OSError):
        entries = {place: entry for place, entry in _all().items() if os.path.exists(place)}
        entries[key] = {"stamp": stamp, "sha256": digest}
        memory().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not_private(memory().parent):
            return
        # A folder of its own is its owner's alone, and leaves nothing half-written behind.
        with tempfile.TemporaryDirectory(prefix=_MEMORY, dir=memory().parent) as folder:
            written = Path(folder, _MEMORY)
            written.touch(mode=0o600)
            written.write_text(json.dumps(entries), encoding="utf-8")
            written.replace(memory())
