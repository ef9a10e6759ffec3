"""Starts this process's command again, in the same process: what a kill and the same command do, at once.

Ranks that hold slices of a model cannot undo a pass in which one of them ran out of memory, as the others wait for it
in a collective. A new start can, and a run resumes by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

_permitted = False
_environment: dict[str, str] = {}
_descriptors: set[int] = set()


def remember() -> None:
    """Keep what a new start is to have as well: the environment, in which libraries and this package set variables for
    themselves, and the inherited files, such as a lock that a wrapper script holds.
    """
    _environment.update(os.environ)
    with contextlib.suppress(OSError):  # Windows, where no process can be replaced
        _descriptors.update(_inheritable())


def _inheritable() -> Iterator[int]:
    """The open files that a new program would have; Python's own are not among them."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.get_inheritable(descriptor):
                yield descriptor


@contextlib.contextmanager
def permitted() -> Iterator[None]:
    """In the block the process may be replaced: its command line has no other work than this."""
    global _permitted
    _permitted = True
    try:
        yield
    finally:
        _permitted = False


def is_permitted() -> bool:
    """Whether the process may be replaced. A script that calls `finetune.train` must not be run from its top again."""
    return _permitted


def now() -> NoReturn:
    """Replace this process, from any of its threads; the launcher sees the same process go on.

    Raises OSError if the system refuses.
    """
    for descriptor in set(_inheritable()) - _descriptors - {0, 1, 2}:  # sockets and devices of libraries
        with contextlib.suppress(OSError):  # closed meanwhile by another thread
            os.set_inheritable(descriptor, False)
    for stream in (sys.stdout, sys.stderr):  # what is not written yet would be lost, with the reason of the new start
        with contextlib.suppress(Exception):
            stream.flush()
    # An earlier run is aside by now; a second `--fresh` would move this one.
    arguments = [argument for argument in sys.orig_argv[1:] if argument != "--fresh"]
    os.execve(sys.executable, [sys.executable, *arguments], _environment)
