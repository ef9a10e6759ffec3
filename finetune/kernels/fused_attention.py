"""Queries, keys and values as one product, and their rotary embedding (arXiv 2104.09864) in place.

Everything else stays the attention's own code: norms of queries and keys, soft caps, windows, the attention function.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.kernels import lora, ops
from finetune.model.recompute import keeping
from finetune.runtime import patches

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ROTARY = patches.ROTARY.attribute
"""The global under which the code of transformers' attention modules calls the rotary embedding."""


def has_structure(module: nn.Module) -> bool:
    """Whether `module` has an adapted layer, and projects queries, keys and values by three layers or rotates them."""
    return any(map(lora.is_adapted, module.children())) and (bool(layers(module)) or _rotates(module))


def layers(module: nn.Module) -> list[nn.Module]:
    """The layers of queries, keys and values if all three take inputs of one width and one is adapted; else none."""
    projections: list[Any] = [getattr(module, name, None) for name in _PROJECTIONS]
    if any(not isinstance(layer, nn.Module) for layer in projections) or not any(map(lora.is_adapted, projections)):
        return []
    return projections if len({getattr(layer, "in_features", None) for layer in projections}) == 1 else []


def obstacle(module: nn.Module) -> str | None:
    """The reason why the module cannot be fused; None if it can."""
    return lora.obstacle_together(layers(module))


def replace(module: Any) -> Callable[[], None]:
    """Compute the layers and the rotation here; returns a function that undoes it."""
    joined = _Joined(layers(module))
    undo = [lora.put(layer, joined.forward_of(number)) for number, layer in enumerate(joined.layers)]
    own = _with_rotary(_written(module)) if _rotates(module) else type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with joined:
            return own(module, *args, **kwargs)

    undo.append(lora.put(module, forward))

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all


class _Joined:
    """Layers that the model calls one by one with the same input: the first call computes them all.

    A context for the attention's forward pass: what was computed and not fetched is dropped at its end.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._open = False
        self._x: Tensor | None = None
        self._made: dict[int, Tensor] = {}

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *_: object) -> None:
        self._open, self._x, self._made = False, None, {}

    def forward_of(self, number: int) -> Callable[..., Tensor]:
        """The forward pass that replaces the one of layer `number`."""
        plain = self.layers[number].forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args or kwargs or not self._open or not lora.ready(x, self.layers):
                computed: Tensor = plain(x, *args, **kwargs)
                return computed
            if x is not self._x or number not in self._made:
                self._x = x
                self._made = dict(enumerate(lora.project(x, [lora.current(layer) for layer in self.layers])))
            return self._made.pop(number)

        return forward


class _Rotate(torch.autograd.Function):
    """In place on queries and keys (rows, tokens, heads, head_dim), and in the backward pass on their gradients.

    Both come from a product or a norm, which keep nothing of them for their own backward passes; on copies where
    products are kept for a recomputation.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # Detached, because values lie in the same block, and autograd would take them as changed too.
        q, k = (q.clone(), k.clone()) if keeping.keeps_products() else (q.data, k.data)
        cos, sin = ops.along_rows(cos), ops.along_rows(sin)
        ops.rope_(q, k, cos, sin)
        ctx.save_for_backward(cos, sin)
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dq, dk = ops.along_rows(dq), ops.along_rows(dk)
        ops.rope_(dq, dk, *ctx.saved_tensors, True)
        return dq, dk, None, None


def _rotary(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, computed here for q and k (rows, heads, tokens, head_dim), cos and sin (rows or 1, tokens, rotated)."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Rotated in place, so that a copy with its elements side by side would not do.
        side_by_side = q.stride(-1) == k.stride(-1) == 1
        if args or kwargs or q.dim() != 4 or cos.dim() != 3 or not side_by_side:
            return plain(q, k, cos, sin, *args, **kwargs)
        rotated = _Rotate.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return tuple(each.transpose(1, 2) for each in rotated)

    return rotate


def _written(module: nn.Module) -> Any:
    """The forward pass as it is written, without decorators: transformers 5.24 renames arguments of older callers."""
    return inspect.unwrap(type(module).forward)


@functools.cache
def _with_rotary(forward: Any) -> Callable[..., Any]:
    """A copy of the function `forward` that calls the rotary embedding of this module, by changed globals."""
    names = {**forward.__globals__, _ROTARY: _rotary(forward.__globals__[_ROTARY])}
    copy = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _rotates(module: nn.Module) -> bool:
    """Whether the code of `module` rotates queries and keys as `rope_` does."""
    forward = _written(module)
    code = getattr(forward, "__code__", None)
    plain = getattr(forward, "__globals__", {}).get(_ROTARY)
    return code is not None and _ROTARY in code.co_names and plain is not None and _is_half_rotation(plain)


@functools.cache
def _is_half_rotation(plain: Callable[..., Any]) -> bool:
    """Whether a rotary embedding rotates the first half of the dimensions against the second, by random values."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 3, 8, generator=generator)  # (rows, heads, tokens, head_dim)
    angles = torch.randn(1, 3, 4, generator=generator).repeat(1, 1, 2)
    try:
        expected = plain(q, k, angles.cos(), angles.sin())
    except Exception:  # the model's code may raise anything, and want other arguments
        return False
    ops.rope_(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin())
    return all(torch.allclose(own, other, atol=1e-6) for own, other in zip((q, k), expected, strict=True))
