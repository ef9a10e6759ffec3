"""Replaces attributes of libraries. `patches.toml` lists them all, with the reasons; `docs/patches.md` is made from it.

An attribute is replaced only through its entry: `with patches.IS_TRACING.by(function): ...` in a block, or
`undo = patches.MODULE_FORWARD.put(function, module)` for longer. `tests/runtime/test_patches.py` checks that each
target exists in the installed version and has the signature that its replacement was written for; `tests/house.py`
checks that nothing is replaced without an entry.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    `target`: module, colon, attribute path. `read_at`: libraries and the versions they were read at. `signature`: as
    the test of the registry reads it, one for each form that the allowed versions have. `until`: what makes the patch
    unnecessary. `objects`: whose attribute is replaced, if it is that of objects or classes given at run time; `target`
    is then one example.
    """

    target: str
    read_at: str
    signature: str | list[str]
    why: str
    until: str
    objects: str = ""

    @property
    def attribute(self) -> str:
        """The name of the replaced attribute."""
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def owner(self) -> Any:
        """The module or class of `target`; imports it."""
        module, _, path = self.target.partition(":")
        owner = importlib.import_module(module)
        for name in path.split(".")[:-1]:
            owner = getattr(owner, name)
        return owner

    @contextlib.contextmanager
    def by(self, value: Any, owner: Any = None) -> Iterator[None]:
        """In the block, replace the attribute by `value`; `owner` is one of `objects`."""
        undo = self.put(value, owner)
        try:
            yield
        finally:
            undo()

    def put(self, value: Any, owner: Any = None) -> Callable[[], None]:
        """Replace the attribute by `value`, and return a function that restores it.

        `owner` is one of `objects`, which a class for a value becomes its class.
        """
        assert (owner is not None) == bool(self.objects), self.target
        name = "__class__" if self.objects and inspect.isclass(value) else self.attribute
        owner = self.owner() if owner is None else owner
        before = vars(owner).get(name, _ABSENT)
        if name == "__class__" or isinstance(getattr(type(owner), name, None), property):
            before = getattr(owner, name)
        setattr(owner, name, value)

        def undo() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        return undo

    @contextlib.contextmanager
    def in_table(self, table: Any, key: str, value: Any) -> Iterator[None]:
        """In the block, put `value` in front of what a library's table has registered for `key`."""
        table[key] = value
        try:
            yield
        finally:
            del table[key]

    def kernels(self, dispatch_key: str = "") -> Any:
        """A torch library in whose lifetime kernels of the target's operators are replaced."""
        import torch

        return torch.library.Library(self.target.split(":ops.")[1].split(".")[0], "IMPL", dispatch_key)


@functools.cache
def entries() -> dict[str, Patch]:
    """All entries by name, in the order of `patches.toml`."""
    table = resources.files(__package__).joinpath("patches.toml").read_text(encoding="utf-8")
    return {name: Patch(**facts) for name, facts in tomllib.loads(table).items()}


def __getattr__(name: str) -> Patch:
    if name not in entries():
        raise AttributeError(f"{name} is no entry of patches.toml")
    return entries()[name]
