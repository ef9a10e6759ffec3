"""Operators by the names of their schemas, such as `aten::mm` and `aten::sum.dim_IntList`, and what they move."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import torch


def find(name: str) -> Any:
    """The operator of this name, with the overload `default` where it says none."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def schema(operator: Any) -> Any:
    """An operator's schema: its `arguments`, and whether it `is_mutable`."""
    return operator._schema  # noqa: SLF001 -- torch 2.13 tells neither by a public name


# These write over a tensor without reading it, as does any operator with an argument named `out`.
_OVERWRITE = ("aten::copy_", "aten::fill_", "aten::zero_")
# These read of their first argument no more than they return, or only its shape.
_GATHER = ("aten::embedding", "aten::gather", "aten::index.Tensor", "aten::index_select")
_SHAPED_LIKE = re.compile(r"aten::(new_|\w+_like\b)")


def launches_nothing(operator: Any) -> bool:
    """True for an operator that only allocates."""
    return operator.name().startswith(("aten::empty", "aten::new_empty"))


def moved_bytes(operator: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an operator reads and writes, by its schema; a tensor changed in place counts twice."""
    passes, fresh = _passes(operator)
    results = (out,) if len(fresh) == 1 else out or ()
    moved = written = sum(_bytes(result) for new, result in zip(fresh, results, strict=True) if new)
    given = [*zip(passes.values(), args, strict=False), *((passes[key], value) for key, value in kwargs.items())]
    for (times, gathers), value in given:
        size = _bytes(value)
        moved += times * (min(size, written) if gathers else size)
    return moved


@functools.cache
def _passes(operator: Any) -> tuple[dict[str, tuple[int, bool]], list[bool]]:
    """For each argument, how often an operator goes over it, and whether it reads no more of it than it returns; and
    whether each result is new.
    """
    passes, name = {}, operator.name()
    for number, argument in enumerate(schema(operator).arguments):
        changed = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = changed and (argument.name == "out" or name in _OVERWRITE)
        gathers = number == 0 and name in _GATHER
        only_shape = number == 0 and not gathers and _SHAPED_LIKE.match(name)
        passes[argument.name] = 0 if only_shape else changed + (not overwritten), gathers
    return passes, [returned.alias_info is None for returned in schema(operator).returns]


def _bytes(value: Any) -> int:
    """The bytes of the tensors in an argument; what a tensor repeats along a dimension (stride 0) counts once."""
    if isinstance(value, torch.Tensor):
        sizes = zip(value.shape, value.stride(), strict=True)
        return value.element_size() * math.prod([size for size, stride in sizes if stride or not size])
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0


def flat(values: Any) -> Iterator[Any]:
    """A value, or those in lists of any depth."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from flat(value)
    else:
        yield values
