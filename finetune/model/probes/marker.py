"""Names what is being tried, in a file of the user's cache that stays if the process dies: the next start does without.

A kernel may crash its process, or hang until the user or the power ends it. The process holds a lock on its file, which
the system releases however it ends, so a file that nobody holds was left behind. It counts for the same kind of device
with the same driver and versions; deleting it lets what it names be tried again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from finetune.errors import Terminated
from finetune.model import probes
from finetune.runtime import environment
from finetune.storage import private

# Ctrl-C and SIGTERM end a hang only after this long; earlier, somebody has changed their mind. Compiling a kernel takes
# a few seconds.
_HANG_SECONDS = 60.0


@dataclass
class _File:
    """The file of this process, open and locked. `names`: what is under way, the innermost last; `written`: when it
    was named, in seconds of the monotonic clock.
    """

    descriptor: int
    path: Path
    names: list[str] = field(default_factory=list)
    written: float = 0.0
    stays: bool = False

    def write(self) -> None:
        """Write the innermost name, so that it outlasts a loss of power."""
        self.written = time.monotonic()
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, self.names[-1].encode(), 0)
            os.fsync(self.descriptor)


_file: _File | None = None


@contextlib.contextmanager
def under_way(name: str, device: torch.device) -> Iterator[None]:
    """In the block, a file names what is tried on `device`; a block within another names a part of it.

    It stays if the process ends in the block, if the block leaves a GPU that cannot be used any more, and if it is
    interrupted after _HANG_SECONDS. Without a private cache, or locks, there is no file.
    """
    global _file
    probes.wait_for_gpu()  # what was queued before is not this one's
    outer = _file
    file = _file = outer or _opened(device)
    if file is None:
        yield
        return
    file.names.append(name)
    file.write()
    try:
        yield
        probes.wait_for_gpu()
    except (KeyboardInterrupt, Terminated):
        file.stays = file.stays or time.monotonic() - file.written > _HANG_SECONDS
        raise
    except Exception:
        file.stays = file.stays or probes.gpu_failed()
        raise
    finally:
        _file = outer
        if not file.stays:
            file.names.pop()
            if outer:
                file.write()
            else:
                file.path.unlink(missing_ok=True)
        if outer is None:
            os.close(file.descriptor)


def left_behind(device: torch.device) -> dict[Path, str]:
    """The files of processes that ended while they tried something on such a device, with its name."""
    found: dict[Path, str] = {}
    for path in sorted(_folder().glob(f"{_key(device)}-*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises where its process is alive
                name = (private.read(path) or b"").decode()
            finally:
                os.close(descriptor)
            if name:
                found[path] = name
    return found


def ended(device: torch.device) -> frozenset[str]:
    """The names of what was tried on such a device when a process ended."""
    return frozenset(left_behind(device).values())


def _folder() -> Path:
    return private.folder_beside("probes")


def _opened(device: torch.device) -> _File | None:
    """A new file that this process holds; None if others could write it, or the file system has no locks."""
    with contextlib.suppress(OSError):
        private.make_folder(_folder())
        if private.not_private(_folder()):
            return None
        descriptor, path = tempfile.mkstemp(prefix=f"{_key(device)}-", dir=_folder())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            return None
        return _File(descriptor, Path(path))
    return None


@functools.cache
def _key(device: torch.device) -> str:
    versions = {**environment.packages(), "triton": environment.version_of("triton")}
    parts = [environment.hardware(device), versions, environment.code_hash()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
