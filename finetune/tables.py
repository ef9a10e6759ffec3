"""Tables of the core that extras add to: each is completed when its module is imported, not before."""

from __future__ import annotations

from collections.abc import Callable

_ADDITIONS: dict[str, list[Callable[[], None]]] = {}


def extend(module: str, add: Callable[[], None]) -> None:
    """Call `add` once `module` is imported, which nothing has done yet; it may import what it adds to."""
    _ADDITIONS.setdefault(module, []).append(add)


def complete(module: str) -> None:
    """Make the additions to the tables of a module, which calls this at its end."""
    for add in _ADDITIONS.pop(module, ()):
        add()
