"""Root-mean-square normalization (arXiv 1910.07467) with a frozen weight, as modules of transformers compute it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.kernels import ops
from finetune.kernels.lora import put
from finetune.kernels.room import narrowed


@dataclass(frozen=True)
class NormFormula:
    """The number added to the weight; whether values are rounded to the input's type before or after the product."""

    offset: float
    cast_first: bool


# Llama's, OLMo 2's and Gemma's.
_FORMULAS = (NormFormula(0.0, True), NormFormula(0.0, False), NormFormula(1.0, False))


def has_structure(module: nn.Module) -> bool:
    """Whether the only parameter of `module` is a vector, with which it computes a root-mean-square normalization.

    Some take a gate as well (Mamba 2's), and have another structure.
    """
    own, taken = dict(module.named_parameters()), inspect.signature(module.forward).parameters
    return set(own) == {"weight"} and own["weight"].dim() == 1 and len(taken) == 1 and _formula(module) is not None


def obstacle(module: Any) -> str | None:
    """The reason why the module cannot be fused; None if it can."""
    return "a norm that is trained" if module.weight.requires_grad else None


def replace(module: Any, room: tuple[int, int] = (0, 0)) -> Callable[[], None]:
    """Compute the module here; returns a function that undoes it.

    `room` are the columns that it leaves beside its output, and beside the gradient of its input.
    """
    plain, eps, formula = module.forward, _eps(module), _formula(module)
    assert eps is not None
    assert formula is not None

    def forward(x: Tensor) -> Tensor:
        weight = module.weight
        if weight.dtype is not x.dtype:
            normalized: Tensor = plain(x)
            return normalized
        x, inputs = _with_residual(x)
        y: Tensor = _RmsNorm.apply(x, weight, eps, formula, room, inputs)
        return y

    return put(module, forward)


_NormInputs = list[Any]
"""What the backward pass of a norm needs besides the gradient of its output, once that pass begins."""


def _with_residual(x: Tensor) -> tuple[Tensor, _NormInputs | None]:
    """`x` for a norm, whose gradient is then added to that of all later uses of `x` by the norm's own kernel.

    None beside it where autograd must add them: the history of a view or a leaf cannot be replaced.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or x.is_leaf or x._is_view() or x.stride(-1) != 1:  # noqa: SLF001
        return x, None
    inputs: _NormInputs = []
    # The values of `x` stay as they are, so for those who saved them it is not changed.
    with torch.autograd._unsafe_preserve_version_counter(x):  # noqa: SLF001 -- torch 2.13 has no public name for it
        _, alias = _Residual.apply(x, inputs)
    return alias, inputs


class _Residual(torch.autograd.Function):
    """Becomes the origin of x itself, which the model's code adds to a block's output, and of x as a norm's input.

    The norm hands on the gradient of its own output, and `inputs`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: _NormInputs) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.inputs = inputs
        ctx.mark_dirty(x)
        return x, x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, None]:
        if dy is None:
            return dx, None
        inputs, room = ctx.inputs
        ctx.inputs.clear()
        return _of_input(dy, inputs, room, dx), None


class _RmsNorm(torch.autograd.Function):
    """Saves the input and 1/rms for the backward pass, which with `inputs` is that of `_Residual`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, formula: NormFormula, room: tuple[int, int],
        inputs: _NormInputs | None,
    ) -> Tensor:  # fmt: skip
        x = ops.along_rows(x)
        y, rstd = ops.rms_norm(x, weight, eps, formula.offset, formula.cast_first, room[0])
        ctx.offset, ctx.inputs, ctx.room = formula.offset, inputs, room[1]
        ctx.save_for_backward(x, weight, rstd)
        return narrowed(y, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        inputs = *ctx.saved_tensors, ctx.offset
        if ctx.inputs is None:
            return _of_input(dy, inputs, ctx.room, None), *[None] * 5
        ctx.inputs[:] = inputs, ctx.room
        return dy, *[None] * 5


def _of_input(dy: Tensor, inputs: tuple[Any, ...], room: int, onto: Tensor | None) -> Tensor:
    """The gradient of x, with room beside it; `inputs` are x, weight, 1/rms and offset."""
    onto = None if onto is None else ops.along_rows(onto)
    return narrowed(ops.rms_norm_backward(ops.along_rows(dy), *inputs, onto, room), dy.shape[-1])


def _eps(module: nn.Module) -> float | None:
    values = [value for name in ("variance_epsilon", "eps") if isinstance(value := getattr(module, name, None), float)]
    return values[0] if len(values) == 1 else None


def _formula(module: Any) -> NormFormula | None:
    """The formula that gives the module's own result to the bit on random values; None if none does."""
    eps, width = _eps(module), len(module.weight)
    if eps is None:
        return None
    generator = torch.Generator().manual_seed(0)
    # Values small enough for eps to count, and in bfloat16, which shows each rounding.
    x = (torch.randn(8, width, generator=generator) * eps**0.5).bfloat16()
    weight = torch.randn(width, generator=generator).bfloat16()
    try:
        expected = torch.func.functional_call(module, {"weight": weight}, (x,))
    except Exception:  # the model's code may raise anything, and want other arguments
        return None
    for formula in _FORMULAS:
        output, _ = ops.rms_norm(x, weight, eps, formula.offset, formula.cast_first)
        if torch.equal(output, expected):
            return formula
    return None
