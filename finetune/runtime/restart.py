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


def remember() -> None:
    """Keep the environment as it is, for a new start: libraries and this package set variables for themselves."""
    _environment.update(os.environ)


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
    for descriptor in map(int, os.listdir("/dev/fd")):  # sockets and devices that a library left to be inherited
        if descriptor > 2:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.set_inheritable(descriptor, False)
    for stream in (sys.stdout, sys.stderr):  # what is not written yet would be lost, with the reason of the new start
        with contextlib.suppress(Exception):
            stream.flush()
    # An earlier run is aside by now; a second `--fresh` would move this one.
    arguments = [argument for argument in sys.orig_argv[1:] if argument != "--fresh"]
    os.execve(sys.executable, [sys.executable, *arguments], _environment)
