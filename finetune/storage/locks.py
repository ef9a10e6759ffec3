"""Files that one process at a time holds; the kernel releases them however the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from finetune.errors import InUseError, MachineError
from finetune.storage import files

_SAID_SECONDS, _MOST_SECONDS = 5, 3600
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def locked(file: Path, what: str, otherwise: str, *, wait: bool = False) -> Iterator[None]:
    """In the block, this process holds `file`, which is made. Raises InUseError where another one does.

    `what` it guards and what to do `otherwise` are for the message. With `wait`, a running process is waited for, up to
    an hour.
    """
    try:
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise MachineError(files.not_written(file, error)) from None
    try:
        _take(opened, file, what, otherwise, wait=wait)
        try:
            os.ftruncate(opened, 0)
            os.pwrite(opened, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise MachineError(files.not_written(file, error)) from None
        yield
    finally:
        os.close(opened)


def _take(opened: int, file: Path, what: str, otherwise: str, *, wait: bool) -> None:
    started, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(opened)
            waited_seconds = time.monotonic() - started
            whose = f"process {holder}" if holder else "another process, perhaps on another machine"
            in_use = f"{what} is in use by {whose}"
            if holder and _is_stopped(holder):
                raise InUseError(
                    f"{in_use}, which is stopped: continue it by `kill -CONT {holder}`, end it, {otherwise}"
                ) from None
            if not wait or waited_seconds > _MOST_SECONDS:
                raise InUseError(f"{in_use}: wait until it ends, stop it, {otherwise}") from None
            if not said and waited_seconds > _SAID_SECONDS:
                sys.stderr.write(f"{in_use}: waiting until it ends; stop waiting by Ctrl-C\n")
                said = True
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            # Some network file systems do not support locks; training there matters more than the guard.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise MachineError(f"{file} cannot be locked: {error.strerror}") from None
            return


def _holder(opened: int) -> int | None:
    """The process that holds a file, by its number in there; None if the system does not list that process as holding
    it, as on another machine or in another container, which share the file but not its number.

    The list (`man proc_locks`) has the file's inode and device, of which the latter differs from `stat`'s on Btrfs.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):  # no number, or a list of another form
        holder, inode = int(os.pread(opened, 100, 0)), os.fstat(opened).st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines():
            fields = line.split()
            listed = fields[1], fields[4], fields[5].rpartition(":")[2]
            if listed == ("FLOCK", str(holder), str(inode)):
                return holder
    return None


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return state[:1] == ["T"]
    return False
