"""The on-disk cache of prepared data.

An entry is a folder named by its key, under `HF_DATASETS_CACHE/finetune-<user id>`. It is written under a temporary
name and renamed, so it is either complete or absent; corruption is detected by the checksums in its manifest, and the
entry is rebuilt. Leftovers of a killed process are removed by the next that creates an entry.

The cache of `datasets` is not used: its keys are hashes of pickled code, and it trusts whoever can write to it. A
folder that another user owns or can write to is not trusted here, since nobody looks at rows before they are trained.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import MachineError
from finetune.storage.files import cause, remedy
from finetune.storage.private import BASES, cache_folder, not_private

_LOG = logging.getLogger(__name__)

_MANIFEST = "manifest.json"

# Entries unused for this long are removed when a new one is created.
_KEPT_SECONDS = 30 * 24 * 3600
_MAKING = ".making-"
# A process locks its folder right after creating it, so an older folder without a lock is abandoned.
_LOCKED_SECONDS = 60


def folder() -> Path:
    """The folder of the entries; a temporary one, removed when the process exits, if it is not private to this user."""
    path = cache_folder()
    if os.path.lexists(path) and (why := not_private(path)):
        return _temporary(path, why)
    return path


@functools.cache
def _temporary(path: Path, why: str) -> Path:
    with writing(Path(tempfile.gettempdir())):
        made = Path(tempfile.mkdtemp(prefix="finetune-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    _LOG.warning("%s is not used: %s. The data is prepared in %s, for this run only", path, why, made)
    return made


def entry(key: Callable[[], str | None], fill: Callable[[Path], None]) -> Path:
    """The cached folder for this `key`, or a new one filled by `fill`.

    `key` identifies the content of the folder, or returns None if it is unknown. It is called again after filling,
    because a file may have changed meanwhile; without a certain key, the folder is removed when this process exits.
    Raises MachineError if the folder cannot be written, and whatever `fill` raises, after removing the folder.
    """
    before = key()
    if before and (cached := _cached(before)):
        return cached
    with writing():
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_unused()
        made = Path(tempfile.mkdtemp(prefix=_MAKING, dir=folder()))
        lock = _locked(made)  # until the entry is published, or this process ends
    try:
        fill(made)
        if not before or key() != before:
            atexit.register(shutil.rmtree, made, ignore_errors=True)
            return made
        with writing():
            (made / _MANIFEST).write_text(json.dumps(_manifest(made)), encoding="utf-8")
            published = _published(made, before)
        os.close(lock)
        return published
    except BaseException:
        os.close(lock)
        shutil.rmtree(made, ignore_errors=True)
        raise


@contextlib.contextmanager
def writing(path: Path | None = None) -> Iterator[None]:
    """Convert an OSError in the block into a MachineError that says the folder cannot be written."""
    try:
        yield
    except OSError as error:
        path = (path or folder()).absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        raise MachineError(
            f"{path}: the prepared data cannot be written: {cause(error, there)}. It takes 8 bytes per token: "
            f"{remedy(error)}, delete that folder if other jobs have filled it, or point HF_DATASETS_CACHE "
            "elsewhere"
        ) from None


def has(key: str) -> bool:
    """Whether there is an undamaged entry of this key."""
    return _cached(key) is not None


def _cached(key: str) -> Path | None:
    entry = folder() / key
    if not_private(entry):
        return None
    try:
        if json.loads((entry / _MANIFEST).read_text(encoding="utf-8")) != _manifest(entry):
            return None
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(entry)
    return entry


def _published(made: Path, key: str) -> Path:
    target = folder() / key
    for _ in range(2):
        with contextlib.suppress(OSError):
            made.rename(target)
            return target
        if cached := _cached(key):  # another process was faster
            shutil.rmtree(made, ignore_errors=True)
            return cached
        shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    return target


def _remove_unused() -> None:
    for entry in folder().iterdir():
        if entry.name == BASES:
            continue
        with contextlib.suppress(OSError):
            unused_seconds = time.time() - entry.stat().st_mtime
            making = entry.name.startswith(_MAKING) and unused_seconds > _LOCKED_SECONDS
            if unused_seconds > _KEPT_SECONDS or (making and _abandoned(entry)):
                shutil.rmtree(entry)


def _locked(made: Path) -> int:
    """The open folder, locked while it is being filled. Some network file systems do not support locks."""
    opened = os.open(made, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return opened


def _abandoned(made: Path) -> bool:
    """Whether the process that was filling a folder has ended. Raises OSError if that cannot be determined."""
    opened = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(opened)
    return True


def _manifest(entry: Path) -> dict[str, Any]:
    """Size and checksum of each file. They detect corruption, not tampering: the folder is private to its owner."""
    files = sorted(file for file in entry.iterdir() if file.name != _MANIFEST)
    return {file.name: {"bytes": file.stat().st_size, "xxh3": digest(file)} for file in files}


def digest_of(content: bytes) -> str:
    """xxh3 (128 bits, hex)."""
    import xxhash

    return xxhash.xxh3_128(content).hexdigest()


def digest(file: Path) -> str:
    """xxh3 (128 bits, hex) of a file's bytes, computed at disk speed. Raises OSError."""
    import xxhash

    with open(file, "rb", buffering=0) as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
