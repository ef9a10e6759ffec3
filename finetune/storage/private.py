"""The files of this user's cache, and the check that nobody else can write them: what others could is not trusted."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

_MOST_BYTES = 2**24


def data_cache() -> Path:
    """The cache of `datasets` (its config.py, version 5.2), which takes half a second to import."""
    if own := os.getenv("HF_DATASETS_CACHE"):
        return Path(own)
    caches = os.getenv("XDG_CACHE_HOME", "~/.cache")
    return Path(os.getenv("HF_HOME", os.path.join(caches, "huggingface"))).expanduser() / "datasets"


def cache_folder() -> Path:
    """This user's cache folder, below `HF_HOME` or `HF_DATASETS_CACHE`, which users of a cluster may share. Check it
    with `not_private` before using anything in it."""
    return data_cache() / f"finetune-{os.geteuid()}"


def not_private(path: Path) -> str | None:
    """The reason why other users could have written `path`; None if only this user (and root) could.

    A link and its target must both belong to this user. Parent folders are not checked: whoever can write there can
    replace this folder, but not by one that belongs to this user.
    """
    try:
        statuses = [os.lstat(path), os.stat(path)]
    except OSError as error:
        return f"it cannot be accessed ({error.strerror})"
    if any(one.st_uid != os.geteuid() for one in statuses):
        return "it belongs to another user"
    if statuses[-1].st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to it (fix with `chmod go-w {path}`)"
    return None


def make_folder(folder: Path) -> None:
    """Make the cache, or a folder of it, for this user alone, whatever the umask says. Raises OSError."""
    cache_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def read(path: Path, most_bytes: int = _MOST_BYTES) -> bytes | None:
    """The content of a file of the cache; None if it is missing, too large, or others could have written it."""
    with contextlib.suppress(OSError):
        if not_private(path.parent):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            status = os.fstat(descriptor)
            ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if ours and stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes:
                return opened.read()
    return None


def write(path: Path, content: bytes) -> None:
    """Replace a file of the cache. Raises OSError; PermissionError if others could write to its folder."""
    make_folder(path.parent)
    if why := not_private(path.parent):
        raise PermissionError(f"{path.parent}: {why}")
    # A temporary folder is private to its owner, and nothing half-written is left behind.
    with tempfile.TemporaryDirectory(prefix=path.name, dir=path.parent) as folder:
        written = Path(folder, path.name)
        written.touch(mode=0o600)
        written.write_bytes(content)
        written.replace(path)
