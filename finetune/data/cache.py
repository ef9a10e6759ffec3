"""The on-disk cache of prepared data.

An entry is a folder named by a key, under `HF_DATASETS_CACHE/finetune-<user id>`. It is written under a temporary name
and renamed once, so that it is complete or absent, even if two processes make the same one. Later damage is detected by
the sizes and hashes in its manifest, and the entry is made again; leftovers of a killed process are removed by the next
one that makes an entry. Deleting the folder costs a new preparation and nothing else.

The cache of `datasets` is keyed by hashes of pickled code and trusts whoever may write to it, so it is not used. A
folder that another user owns or may write to is not trusted either, since its rows would be trained on unseen; each
process then prepares the data for itself.
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
from finetune.storage.private import cache_folder, not_private

_LOG = logging.getLogger(__name__)

_MANIFEST = "manifest.json"

# Entries that nothing has used for so long are removed when a new one is made.
_KEPT_SECONDS = 30 * 24 * 3600
_MAKING = ".making-"
# A process locks the folder that it fills at once; after so many seconds none can be about to.
_LOCKED_SECONDS = 60


def folder() -> Path:
    """Where the entries are; where that is not this user's alone, a temporary folder that goes with the process."""
    place = cache_folder()
    if os.path.lexists(place) and (why := not_private(place)):
        return _temporary(place, why)
    return place


@functools.cache
def _temporary(place: Path, why: str) -> Path:
    with writing(Path(tempfile.gettempdir())):
        made = Path(tempfile.mkdtemp(prefix="finetune-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    _LOG.warning("%s is not used: %s. The data is prepared in %s, for this start alone", place, why, made)
    return made


def entry(key: Callable[[], str | None], fill: Callable[[Path], None]) -> Path:
    """The folder that `fill` fills, as an earlier start left it where there is one for this `key`.

    `key` identifies what goes into the folder, None where that is not known; it is asked again after filling, because a
    file may have changed meanwhile. What has no certain key is kept until this process ends. Raises MachineError
    where the folder cannot be written, and what `fill` raises, which leaves nothing behind.
    """
    before = key()
    if before and (found := _found(before)):
        return found
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
def writing(place: Path | None = None) -> Iterator[None]:
    """Raise an OSError within the block as a MachineError: the folder cannot be written."""
    try:
        yield
    except OSError as error:
        place = (place or folder()).absolute()
        there = next(parent for parent in (place, *place.parents) if parent.exists())
        raise MachineError(
            f"{place}: the prepared data cannot be written there: {error.strerror or error} "
            f"({shutil.disk_usage(there).free / 2**30:.1f} GiB free). It takes 8 bytes a token: make room, delete that "
            "folder if other jobs have filled it, or set HF_DATASETS_CACHE to one elsewhere"
        ) from None


def _found(key: str) -> Path | None:
    found = folder() / key
    if not_private(found):
        return None
    try:
        if json.loads((found / _MANIFEST).read_text(encoding="utf-8")) != _manifest(found):
            return None
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(found)
    return found


def _published(made: Path, key: str) -> Path:
    target = folder() / key
    for _ in range(2):
        with contextlib.suppress(OSError):
            made.rename(target)
            return target
        if found := _found(key):  # by a process that was faster
            shutil.rmtree(made, ignore_errors=True)
            return found
        shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    return target


def _remove_unused() -> None:
    for found in folder().iterdir():
        with contextlib.suppress(OSError):
            unused_seconds = time.time() - found.stat().st_mtime
            making = found.name.startswith(_MAKING) and unused_seconds > _LOCKED_SECONDS
            if unused_seconds > _KEPT_SECONDS or (making and _abandoned(found)):
                shutil.rmtree(found)


def _locked(made: Path) -> int:
    """The open folder, which says by its lock that it is being filled. Some network file systems have no locks."""
    opened = os.open(made, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return opened


def _abandoned(made: Path) -> bool:
    """Whether the process that filled it is gone. Raises OSError where that cannot be determined."""
    opened = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(opened)
    return True


def _manifest(entry: Path) -> dict[str, Any]:
    """Bytes and hash of each file, which detect corruption, not tampering: the folder is private to its owner."""
    files = sorted(file for file in entry.iterdir() if file.name != _MANIFEST)
    return {file.name: {"bytes": file.stat().st_size, "xxh3": digest(file)} for file in files}


def digest(file: Path) -> str:
    """xxh3 (128 bits) of a file's bytes in hex, at the speed of the disk. Raises OSError."""
    import xxhash

    with open(file, "rb", buffering=0) as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
