"""Root-mean-square normalization (arXiv 1910.07467) with a frozen weight, as modules of transformers compute it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

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


_room: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The columns of room that each replaced module leaves."""

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


def replace(module: Any) -> Callable[[], None]:
    """Compute the module here; returns a function that undoes it."""
    plain, eps, formula = module.forward, _eps(module), _formula(module)
    assert eps is not None
    assert formula is not None

    def forward(x: Tensor) -> Tensor:
        weight = module.weight
        if weight.dtype is not x.dtype:
            normalized: Tensor = plain(x)
            return normalized
        y: Tensor = _RmsNorm.apply(x, weight, eps, formula, _room.get(module, 0))
        return y

    return put(module, forward)


def leave_room(module: nn.Module, columns: int) -> None:
    """Let a replaced module leave this many columns of room beside its output (see `kernels.room`)."""
    _room[module] = columns


class _RmsNorm(torch.autograd.Function):
    """Saves the input and 1/rms for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, formula: NormFormula, room: int) -> Tensor:
        x = ops.along_rows(x)
        y, rstd = ops.rms_norm(x, weight, eps, formula.offset, formula.cast_first, room)
        ctx.offset = formula.offset
        ctx.save_for_backward(x, weight, rstd)
        return narrowed(y, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        return ops.rms_norm_backward(ops.along_rows(dy), x, weight, rstd, ctx.offset), None, None, None, None


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
