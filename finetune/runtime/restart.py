"""Starts this process's command again, in the same process: what a kill and the same command do, at once.

Ranks that hold slices of a model cannot undo a pass in which one of them ran out of memory, as the others wait for it
in a collective. A new start can, and a run resumes by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from finetune.errors import INTERRUPTED, Terminated

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ARRIVED = "FINETUNE_SIGNALS_ARRIVED"
"""The variable that gives a new start the descriptor of a pipe, with the number of each signal that came before it."""
_arrived: int | None = None
_environment: dict[str, str] = {}
_descriptors: set[int] = set()


def remember() -> None:
    """Keep what a new start is to have as well: the environment, in which libraries and this package set variables for
    themselves, and the inherited files, such as a lock that a wrapper script holds.

    Ends the process if this is a new start, and a signal came that the program before had no time to act on.
    """
    _end_if_signalled()
    _environment.update(os.environ)
    with contextlib.suppress(OSError):  # Windows, where no process can be replaced
        _descriptors.update(_inheritable())


def _inheritable() -> Iterator[int]:
    """The open files that a new program would have; Python's own are not among them."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.get_inheritable(descriptor):
                yield descriptor


def _end_if_signalled() -> None:
    if pipe := os.environ.pop(_ARRIVED, None):
        with os.fdopen(int(pipe), "rb", buffering=0) as arrived:
            for number in arrived.read() or b"":
                if number in _ENDING:
                    end(number)


def end(number: int) -> NoReturn:
    """End this process, from any of its threads, where it would start again: a signal ends the run anyway."""
    os.write(2, b"error: what was saved before is untouched. Run the same command again to resume\n")
    os._exit(INTERRUPTED if number == signal.SIGINT else Terminated.exit_code)


@contextlib.contextmanager
def permitted() -> Iterator[None]:
    """In the block the process may be replaced: its command line has no other work than this. For the main thread.

    Python's signal handlers do not run while that thread waits in a collective, and a new program does not know what
    they would have done. So signals are written to a pipe as well, on arrival, which the new program reads.
    """
    global _arrived
    _arrived, writing = os.pipe()
    for descriptor in (_arrived, writing):
        os.set_blocking(descriptor, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(_arrived)
        os.close(writing)
        _arrived = None


def is_permitted() -> bool:
    """Whether the process may be replaced. A script that calls `finetune.train` must not be run from its top again."""
    return _arrived is not None


def now() -> NoReturn:
    """Replace this process, which must be permitted, from any of its threads; the launcher sees the same process go on.

    Raises OSError if the system refuses.
    """
    assert _arrived is not None
    for descriptor in set(_inheritable()) - _descriptors - {0, 1, 2}:  # sockets and devices of libraries
        with contextlib.suppress(OSError):  # closed meanwhile by another thread
            os.set_inheritable(descriptor, False)
    for stream in (sys.stdout, sys.stderr):  # what is not written yet would be lost, with the reason of the new start
        with contextlib.suppress(Exception):
            stream.flush()
    # An earlier run is aside by now; a second `--fresh` would move this one.
    arguments = [argument for argument in sys.orig_argv[1:] if argument != "--fresh"]
    os.set_inheritable(_arrived, True)
    os.execve(sys.executable, [sys.executable, *arguments], {**_environment, _ARRIVED: str(_arrived)})
