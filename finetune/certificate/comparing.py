"""Compares each call of a fused operator with its program for a CPU, computed in float32, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.kernels import ops

# The largest error of an element, relative to itself and to the root mean square of the result, and of the result's
# norm, by the coarsest type of its arguments and results. An operator in 16 bit rounds once on a GPU and up to four
# times on a CPU, also where its result is of float32; sums in float32 depend on their order. A wrong element differs by
# about the root mean square.
_ELEMENT = {torch.float32: 1e-4, torch.bfloat16: 16 * 2**-8, torch.float16: 16 * 2**-11}
_NORM = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}
# Their results must be equal to the bit; the codes of a weight are not converted to float32.
_EXACT = ("decode_4bit_", "decode_int8_", "decode_packed_")
# Operators whose results have columns without a meaning (`kernels.room`), with a function from their arguments to the
# number of the columns that have one.
_COLUMNS: dict[str, Callable[..., int]] = {
    "rms_norm": lambda x, *others: int(x.shape[-1]),
    "rms_norm_backward": lambda dy, *others: int(dy.shape[-1]),
    "gated": lambda gate, up, activation, room=0, factor=None, *others: (
        int(gate.shape[-1]) + (0 if factor is None else len(factor))
    ),
}

_REFERENCE: dict[str, Callable[..., Any]] = dict(ops.ON_CPU)
# Guard memory on each side of a result; a multiple of what kernels read at once.
_GUARD_BYTES = 1024
_SENTINEL = 0xA5


class Comparing(TorchDispatchMode):
    """In the block, each call of a fused operator is made a second time and compared with its reference, with guarded
    memory around the results.

    `problem` is the first fault that was seen, as one clause, and `compared` counts the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problem, self.compared = "", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "finetune" and not self.problem:
            self.compared += 1
            self.problem = _problem(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _problem(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The fault of one call, as a clause that begins with the operator's name; empty if there is none."""
    name = operator.name().removeprefix("finetune::")
    expected = _reference(operator, name, args, kwargs)
    first, beside = _tried(operator, args, kwargs)
    if beside:
        return f"`{name}` writes beside its result"
    again, _ = _tried(operator, args, kwargs)
    coarsest = max((one.dtype for one in (*args, *first) if _is_float(one)), key=lambda dtype: torch.finfo(dtype).eps)
    width = _COLUMNS[name](*args) if name in _COLUMNS else None
    for result, second, exact in zip(first, again, expected, strict=True):
        if width and result.dim() == exact.dim() and result.shape[-1] > width:
            result, second, exact = (each[..., :width] for each in (result, second, exact))
        if not torch.equal(result, second):
            return f"`{name}` gives another result the second time"
        if unlike := _unlike(result, exact, None if name in _EXACT else coarsest):
            return f"`{name}` {unlike}"
    return ""


def _tried(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], bool]:
    """The tensors that the operator's program for this device writes or returns, and whether it wrote outside them."""
    program = ops.program(operator.name(), args[0].device.type)
    with _GuardedMemory() as guarded:
        given = [
            guarded.copy(value) if written else value for value, written in zip(args, _written(operator), strict=False)
        ]
        returned = program(*given, **kwargs)
    written = [value for value, is_written in zip(given, _written(operator), strict=False) if is_written]
    return [*written, *(one for one in tree_leaves(returned) if isinstance(one, Tensor))], guarded.was_overwritten()


def _reference(operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The same tensors by the program for a CPU, from values in float32 unless the result must be exact."""

    def wide(value: Any, written: bool) -> Any:
        if value in (torch.bfloat16, torch.float16):
            return torch.float32
        if not isinstance(value, Tensor) or name in _EXACT:
            return value.clone() if written else value
        narrow = value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if narrow else value.clone() if written else value

    given = [wide(value, written) for value, written in zip(args, _written(operator), strict=False)]
    returned = _REFERENCE[operator.name()](*given, **{key: wide(value, False) for key, value in kwargs.items()})
    written = [value for value, is_written in zip(given, _written(operator), strict=False) if is_written]
    return [*written, *(one for one in tree_leaves(returned) if isinstance(one, Tensor))]


def _written(operator: Any) -> Iterator[bool]:
    """For each argument, whether the operator writes into it."""
    schema = operator._schema  # noqa: SLF001 -- torch has no public name for an operator's schema
    for argument in schema.arguments:
        yield argument.alias_info is not None and argument.alias_info.is_write


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _unlike(result: Tensor, exact: Tensor, rounded_to: torch.dtype | None) -> str:
    """Describe how a result differs from the exact one; empty if it does not.

    Rounding to the type `rounded_to` is allowed; None allows no difference.
    """
    if rounded_to is None:
        wrong = int((result != exact).sum())
        return f"decodes {wrong} of {result.numel()} numbers to other values" if wrong else ""
    error, scale = (result.float() - exact.float()).abs(), exact.float().square().mean().sqrt()
    bound = _ELEMENT[rounded_to] * (exact.float().abs() + scale) + torch.finfo(torch.float32).tiny
    wrong = int((~(error <= bound)).sum())  # a NaN is wrong, too
    if wrong:
        largest = float((error / bound).nan_to_num(float("inf")).max())
        return (
            f"computes {wrong} of {result.numel()} elements wrong, by up to {largest:.3g} times what rounding explains"
        )
    distance = float(error.norm() / exact.float().norm().clamp(min=1e-30))
    if distance > _NORM[rounded_to]:
        return f"differs by {distance:.2%} from the same product in float32, more than rounding explains"
    return ""


class _GuardedMemory(TorchDispatchMode):
    """In the block, new empty tensors lie between two guards: memory that nothing may write."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.name() in ("aten::empty.memory_format", "aten::new_empty", "aten::empty_like"):
            return self._guarded(made)
        return made

    def copy(self, tensor: Tensor) -> Tensor:
        """`tensor` with its strides, between two guards."""
        return self._guarded(tensor).copy_(tensor)

    def _guarded(self, like: Tensor) -> Tensor:
        """An empty tensor of the shape and strides of `like`; what its strides leave out is guarded as well."""
        if not like.numel() or like.layout is not torch.strided:
            return like
        guard = _GUARD_BYTES // like.element_size()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        bits = torch.full(((extent + 2 * guard) * like.element_size(),), _SENTINEL, dtype=torch.uint8).to(like.device)
        inner = bits.view(like.dtype).as_strided(like.shape, like.stride(), guard)
        self._blocks.append((bits, inner))
        return inner

    def was_overwritten(self) -> bool:
        """Whether anything outside the tensors was written."""
        for bits, inner in self._blocks:
            beside = torch.ones_like(bits.view(inner.dtype), dtype=torch.bool)
            beside.as_strided(inner.shape, inner.stride(), inner.storage_offset()).fill_(False)
            if (bits.view(-1, inner.element_size())[beside] != _SENTINEL).any():
                return True
        return False
