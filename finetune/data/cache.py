"""The on-disk cache of prepared data.

An entry is a folder named by its key, under `HF_DATASETS_CACHE/finetune-<user id>`. It is written under a temporary
name and renamed, so it is either complete or absent. What a killed process left is removed a day later, by the next
one that creates an entry.

The cache of `datasets` is not used: its keys are hashes of pickled code, and it trusts whoever can write to it. A
folder that another user owns or can write to is not trusted here, since nobody looks at rows before they are trained.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.errors import MachineError
from finetune.storage import files
from finetune.storage.private import cache_folder, not_private

_LOG = logging.getLogger(__name__)

# Entries unused for this long are removed when a new one is created, and those that no process fills any longer.
_KEPT_SECONDS = 30 * 24 * 3600
_FILLED_SECONDS = 24 * 3600
_MAKING = ".making-"


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
    if before and has(before):
        with contextlib.suppress(OSError):
            os.utime(folder() / before)
        return folder() / before
    with writing():
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        for other in folder().iterdir():
            with contextlib.suppress(OSError):
                unused_seconds = time.time() - max(path.stat().st_mtime for path in (other, *other.glob("*")))
                if unused_seconds > (_FILLED_SECONDS if other.name.startswith(_MAKING) else _KEPT_SECONDS):
                    shutil.rmtree(other)
        made = Path(tempfile.mkdtemp(prefix=_MAKING, dir=folder()))
    try:
        fill(made)
        if not before or key() != before:
            atexit.register(shutil.rmtree, made, ignore_errors=True)
            return made
        with writing():
            target = folder() / before
            files.flush(made)
            if os.path.lexists(target) and not has(before):
                shutil.rmtree(target, ignore_errors=True)
            try:
                made.rename(target)  # which fails if another process was faster: its entry may be in use
            except OSError:
                if not has(before):
                    raise
        shutil.rmtree(made, ignore_errors=True)
        return target
    except BaseException:
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
            f"{path}: the prepared data cannot be written: {files.cause(error, there)}. It takes 8 bytes per token: "
            f"{files.remedy(error)}, delete that folder if other jobs have filled it, or point HF_DATASETS_CACHE "
            "elsewhere"
        ) from None


def has(key: str) -> bool:
    """Whether there is an entry of this key that others could not have written."""
    return not not_private(folder() / key)


def digest_of(content: bytes) -> str:
    """xxh3 (128 bits, hex)."""
    import xxhash

    return xxhash.xxh3_128(content).hexdigest()


def digest(file: Path) -> str:
    """xxh3 (128 bits, hex) of a file's bytes, computed at disk speed. Raises OSError."""
    import xxhash

    with open(file, "rb", buffering=0) as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
