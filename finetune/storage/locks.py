"""Files that one process at a time holds; the kernel releases them however the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from finetune.errors import InUseError, MachineError
from finetune.storage import files


@contextlib.contextmanager
def locked(file: Path, what: str, otherwise: str) -> Iterator[None]:
    """In the block, this process holds `file`. Raises InUseError where another one does.

    `what` it guards and what to do `otherwise` are for the message.
    """
    try:
        opened = open(file, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 -- closed below
    except OSError as error:
        raise MachineError(files.not_written(file, error)) from None
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.seek(0)
            holder = re.sub("[^0-9]", "", opened.read(20))
            raise InUseError(
                f"{what} is in use by process {holder}: wait until it ends, stop it, {otherwise}"
            ) from None
        except OSError as error:
            # Some network file systems do not support locks; training there matters more than the guard.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise MachineError(f"{file} cannot be locked: {error.strerror}") from None
        try:
            opened.truncate(0)
            opened.write(f"{os.getpid()}\n")
            opened.flush()
        except OSError as error:
            raise MachineError(files.not_written(file, error)) from None
        yield
