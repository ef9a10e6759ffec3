"""Tables of the core that extras add to: each is completed when its module is imported, not before."""

from __future__ import annotations

import importlib
from collections.abc import Callable

_ADDITIONS: dict[str, list[Callable[[], None] | str]] = {}


def extend(module: str, add: Callable[[], None] | str) -> None:
    """Call `add` once `module` is imported, which nothing has done yet; it may import what it adds to.

    Or import the module of that name, which adds to the table by itself, as one with a command does.
    """
    _ADDITIONS.setdefault(module, []).append(add)


def complete(module: str) -> None:
    """Make the additions to the tables of a module, which calls this at its end."""
    for add in _ADDITIONS.pop(module, ()):
        if isinstance(add, str):
            importlib.import_module(add)
        else:
            add()
