"""Operators by the names of their schemas, such as `aten::mm` and `aten::sum.dim_IntList`, and what they move."""

from __future__ import annotations

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
    arguments, name = schema(operator).arguments, operator.name()
    by_name = {argument.name: argument for argument in arguments}
    returns = schema(operator).returns
    results = zip(returns, (out,) if len(returns) == 1 else out or (), strict=True)
    written = sum(_bytes(result) for returned, result in results if returned.alias_info is None)
    moved = written
    given = [*zip(arguments, args, strict=False), *((by_name[key], value) for key, value in kwargs.items())]
    for argument, value in given:
        size = _bytes(value)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if argument is arguments[0] and name in _GATHER:
            size = min(size, written)
        elif argument is arguments[0] and _SHAPED_LIKE.match(name):
            size = 0
        overwritten = changed and (argument.name == "out" or name in _OVERWRITE)
        moved += size * (changed + (not overwritten))
    return moved


def _bytes(value: Any) -> int:
    """The bytes of the tensors in an argument; what a tensor repeats along a dimension (stride 0) counts once."""
    return sum(
        tensor.element_size()
        * math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
        for tensor in flat(value)
        if isinstance(tensor, torch.Tensor)
    )


def flat(values: Any) -> Iterator[Any]:
    """A value, or those in lists of any depth."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from flat(value)
    else:
        yield values
