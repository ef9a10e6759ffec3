"""Names what is being tried, in a file of the user's cache: if it crashes the process or hangs, the next start does
without.

Python's `faulthandler` writes to the file when the process receives a fatal signal (a kernel that writes where it must
not), and when one thing is tried for longer than _HANG_SECONDS. A process that was killed from outside leaves a file
that has the name alone, which is no evidence against what it tried. The process holds a lock on its file, which the
system releases however it ends, so a file that nobody holds was left behind. It counts for the same kind of device with
the same driver and versions; deleting it lets what it names be tried again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from finetune.model import probes
from finetune.runtime import environment
from finetune.storage import private

# An interruption within this time is a change of mind, after it the end of a hang. Compiling a kernel takes a few
# seconds.
_HANG_SECONDS = 60.0


@dataclass
class _File:
    """The file of this process, open and locked: a line with the innermost of the `names` under way, and after it the
    evidence that it crashed or hung.
    """

    descriptor: int
    path: Path
    names: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Write the innermost name, so that it outlasts a loss of power, and watch how long it takes from here on."""
        with contextlib.suppress(OSError):
            os.lseek(self.descriptor, 0, os.SEEK_SET)  # where faulthandler goes on to write, after the name
            os.ftruncate(self.descriptor, 0)
            os.write(self.descriptor, self.names[-1].encode() + b"\n")
            os.fsync(self.descriptor)
        faulthandler.dump_traceback_later(_HANG_SECONDS, file=self.descriptor)

    def accuses(self) -> bool:
        """Whether there is evidence against what is under way."""
        return os.fstat(self.descriptor).st_size > len(self.names[-1].encode()) + 1


_file: _File | None = None


@contextlib.contextmanager
def under_way(name: str, device: torch.device) -> Iterator[None]:
    """In the block, a file names what is tried on `device`; a block within another names a part of it.

    It stays as evidence if the process crashes in the block, if the block leaves a GPU that cannot be used any more,
    and if it is interrupted after _HANG_SECONDS. Without a private cache, or locks, there is no file.
    """
    global _file
    probes.wait_for_gpu()  # what was queued before is not this one's
    outer = _file
    file = _file = outer or _opened(device)
    if file is None:
        yield
        return
    elsewhere = faulthandler.is_enabled()
    if outer is None:
        faulthandler.enable(file.descriptor, all_threads=False)
    file.names.append(name)
    file.write()
    stays = True  # unless it ends in good order, or is interrupted without evidence
    try:
        yield
        probes.wait_for_gpu()
        stays = False
    except Exception:
        if stays := probes.gpu_failed():
            with contextlib.suppress(OSError):
                os.write(file.descriptor, b"the GPU failed\n")
        raise
    finally:
        _file = outer
        if not stays or not file.accuses():
            file.names.pop()
            if outer:
                file.write()
            else:
                file.path.unlink(missing_ok=True)
        if outer is None:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
            os.close(file.descriptor)
            if elsewhere and sys.__stderr__:
                with contextlib.suppress(OSError, ValueError):  # a notebook may have no such file
                    faulthandler.enable(sys.__stderr__)


def left_behind(device: torch.device) -> dict[Path, str]:
    """The files of processes that crashed or hung while they tried something on such a device, with its name.

    Removes those of processes that were killed from outside, which have no evidence.
    """
    found: dict[Path, str] = {}
    for path in sorted(_folder().glob(f"{_key(device)}-*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises where its process is alive
                name, _, evidence = (private.read(path) or b"").decode().partition("\n")
                if evidence:
                    found[path] = name
                elif name:
                    path.unlink()
            finally:
                os.close(descriptor)
    return found


def ended(device: torch.device) -> frozenset[str]:
    """The names of what was tried on such a device when a process crashed or hung."""
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
