"""sha256 of large files, cached between runs: hashing a base of 13 GB takes 10 to 30 seconds.

A hash is cached by the file's path, device, inode, size, mtime and ctime. Anyone who can write to the file can reset
its mtime, but not its ctime. The cache is one file beside the prepared data; deleting it only means hashing again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from finetune.storage import private

_MEMORY = "file_hashes.json"
# File systems have timestamps as coarse as 2 seconds, within which a file may change again unnoticed.
_COARSEST_TIMESTAMP_NANOSECONDS = 2 * 10**9
_writing = threading.Lock()


def memory() -> Path:
    """The file of cached hashes, beside the prepared data."""
    return private.cache_folder() / _MEMORY


def sha256(file: Path) -> str:
    """sha256 (hex) of a file's bytes, computed or from the cache. Raises OSError."""
    with open(file, "rb") as opened:
        now = time.time_ns()
        key, stamp = os.path.realpath(file), _stamp(os.fstat(opened.fileno()))
        if cached := _remembered(key, stamp):
            return cached
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        is_old = now - max(stamp[-2:]) > _COARSEST_TIMESTAMP_NANOSECONDS
        if is_old and _stamp(os.fstat(opened.fileno())) == stamp:
            # Add the hash, and drop those of deleted files. If the folder cannot be written, nothing is cached.
            with _writing, contextlib.suppress(OSError):
                entries = {path: entry for path, entry in _all().items() if os.path.exists(path)}
                entries[key] = {"stamp": stamp, "sha256": digest}
                private.write(memory(), json.dumps(entries).encode())
    return digest


def known(file: Path) -> bool:
    """Whether the hash of the file is cached."""
    return _remembered(os.path.realpath(file), _stamp(os.stat(file))) is not None


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _remembered(key: str, stamp: list[int]) -> str | None:
    entry = _all().get(key)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(digest := entry.get("sha256"), str):
        return digest
    return None


def _all() -> dict[str, Any]:
    """All cached hashes; none if the file is damaged, or if another user owns or can write it."""
    with contextlib.suppress(ValueError, RecursionError):
        entries = json.loads(private.read(memory()) or b"{}")
        return entries if isinstance(entries, dict) else {}
    return {}
