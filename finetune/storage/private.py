"""The files of this user's cache, and the check that nobody else can write them: what others could is not trusted."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
from pathlib import Path

from finetune.errors import MachineError

_MOST_BYTES = 2**24


def data_cache() -> Path:
    """The cache of `datasets` (its config.py, version 5.2), which takes half a second to import."""
    if own := os.getenv("HF_DATASETS_CACHE"):
        return Path(own)
    caches = os.getenv("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.getenv("HF_HOME") or os.path.join(caches, "huggingface")).expanduser() / "datasets"


def settle_home() -> str | None:
    """Give this process, and those that it starts, a home folder where the system knows none for its user.

    That is so in a container that runs as any number. Libraries fail without one, and write to the working folder where
    a variable such as HF_HOME is empty, which counts as unset from here on. Returns what to say about it. Raises
    MachineError if no folder can be made.
    """
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME"):
        if os.environ.get(name) == "":
            del os.environ[name]
    user = os.geteuid()
    with contextlib.suppress(KeyError):
        pwd.getpwuid(user)
        return None
    os.environ.setdefault("USER", f"user-{user}")  # torch asks for the name
    home = os.environ.get("HOME")
    if home and os.access(home, os.W_OK | os.X_OK):
        return None
    try:
        folder = Path(tempfile.gettempdir(), f"finetune-home-{user}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if folder.is_symlink() or not_private(folder):
            folder = Path(tempfile.mkdtemp(prefix="finetune-home-"))
    except OSError as error:
        raise MachineError(f"there is no home folder, and no temporary one ({error.strerror}); set HOME") from None
    os.environ["HOME"] = str(folder)
    return f"user {user} has no home folder: caches are in {folder}; set HOME to keep them elsewhere"


def cache_folder() -> Path:
    """This user's cache folder, below `HF_HOME` or `HF_DATASETS_CACHE`, which users of a cluster may share. Check it
    with `not_private` before using anything in it."""
    return data_cache() / f"finetune-{os.geteuid()}"


def folder_beside(name: str) -> Path:
    """A folder of this user's beside the cache, for what stays however long it is not used."""
    return Path(f"{cache_folder()}-{name}")


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


def keep(path: Path, content: bytes, most_files: int) -> None:
    """Write a file of a folder of the cache, from which the oldest go where there are too many; not if that fails."""
    with contextlib.suppress(OSError):
        if path.parent.is_dir():
            files = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda one: one.stat().st_mtime, reverse=True)
            for old in files[most_files - 1 :]:
                old.unlink(missing_ok=True)
        write(path, content)


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
