"""Root-mean-square normalization (arXiv 1910.07467) with a frozen weight, as modules of transformers compute it."""

from __future__ import annotations

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
class Rounding:
    """What is added to the weight, and whether values are rounded to the input's type before the product with it."""

    offset: float
    cast_first: bool


_room: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The columns of room that each replaced module leaves."""

# Llama's, OLMo 2's and Gemma's.
_ROUNDINGS = (Rounding(0.0, True), Rounding(0.0, False), Rounding(1.0, False))


def has_structure(module: nn.Module) -> bool:
    """Whether `module` has one vector for a weight, and computes the normalization with it."""
    own = dict(module.named_parameters())
    return set(own) == {"weight"} and own["weight"].dim() == 1 and _rounding(module) is not None


def obstacle(module: Any) -> str | None:
    """Why such a module cannot be computed here."""
    return "a norm that is trained" if module.weight.requires_grad else None


def replace(module: Any) -> Callable[[], None]:
    """Compute the module here; returns what undoes it."""
    plain, eps, rounding = module.forward, _eps(module), _rounding(module)
    assert eps is not None
    assert rounding is not None

    def forward(x: Tensor) -> Tensor:
        weight = module.weight
        if weight.dtype is not x.dtype:
            normalized: Tensor = plain(x)
            return normalized
        y: Tensor = _RmsNorm.apply(x, weight, eps, rounding, _room.get(module, 0))
        return y

    return put(module, forward)


def leave_room(module: nn.Module, columns: int) -> None:
    """Let a replaced module leave this many columns of room beside its output (see `kernels.room`)."""
    _room[module] = columns


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and 1/rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, rounding: Rounding, room: int) -> Tensor:
        y, rstd = ops.rms_norm(x, weight, eps, rounding.offset, rounding.cast_first, room)
        ctx.offset = rounding.offset
        ctx.save_for_backward(x, weight, rstd)
        return narrowed(y, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        return ops.rms_norm_backward(ops.along_rows(dy), x, weight, rstd, ctx.offset), None, None, None, None


def _eps(module: nn.Module) -> float | None:
    found = [value for name in ("variance_epsilon", "eps") if isinstance(value := getattr(module, name, None), float)]
    return found[0] if len(found) == 1 else None


def _rounding(module: Any) -> Rounding | None:
    """Which of the roundings the module has, found by trying; None for one that computes something else."""
    eps, width = _eps(module), len(module.weight)
    if eps is None:
        return None
    generator = torch.Generator().manual_seed(0)
    # So small that eps counts, and in bfloat16, so that each rounding shows.
    x = (torch.randn(8, width, generator=generator) * eps**0.5).bfloat16()
    weight = torch.randn(width, generator=generator).bfloat16()
    try:
        expected = torch.func.functional_call(module, {"weight": weight}, (x,))
    except Exception:  # of whatever kind: it is the model's code, and may want other arguments
        return None
    for rounding in _ROUNDINGS:
        found, _ = ops.rms_norm(x, weight, eps, rounding.offset, rounding.cast_first)
        if torch.equal(found, expected):
            return rounding
    return None
