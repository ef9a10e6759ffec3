"""A gated MLP, down(act(gate(x)) * up(x)), with gate and up in one layer or in two (SwiGLU, GeGLU: arXiv 2002.05202).

Kept for the backward pass: x, gate, up and products of rank r. The last product stands in a function of its own that
keeps nothing, and hands its gradient to the one before: the recomputation of a checkpointed layer ends once all that
was kept is there again, and so before that product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.kernels import lora, ops
from finetune.kernels.lora import Linear, factor_gradients, input_gradient, low_rank, low_rank_gradient, rows

# The names of the layers in transformers: gate and up apart, or as one layer.
_APART, _JOINED, _DOWN = ("gate_proj", "up_proj"), ("gate_up_proj",), "down_proj"
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def has_structure(module: nn.Module) -> bool:
    """Whether `module` has the layers of a gated MLP, one of them adapted."""
    if not _inner(module) or not hasattr(module, _DOWN):
        return False
    found = layers(module)
    return all(isinstance(layer, nn.Module) for layer in found) and any(map(lora.is_adapted, found))


def layers(module: nn.Module) -> list[nn.Module]:
    """The linear layers of a gated MLP, the last one last."""
    return [getattr(module, name) for name in (*_inner(module), _DOWN)]


def obstacle(module: nn.Module) -> str | None:
    """Why such a module cannot be computed here; None where it can."""
    *inner, down = layers(module)
    found = lora.obstacle_together(inner) or lora.obstacle(down)
    return found or (None if _activation(module) else "another activation or another formula")


def replace(module: nn.Module) -> Callable[[], None]:
    """Compute the MLP here; returns what undoes it."""
    plain, activation, parts = module.forward, _activation(module), layers(module)

    def forward(x: Tensor) -> Tensor:
        if not lora.ready(x, parts):
            computed: Tensor = plain(x)
            return computed
        *inner, down = map(lora.current, parts)
        hidden = lora.project(x, inner)
        gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, dim=-1)
        handle, a, low = _Gated.apply(gate, up, activation, down, *lora.factors([down]))
        y: Tensor = _Down.apply(handle, a, low, down)
        return y

    return lora.put(module, forward)


class _Gated(torch.autograd.Function):
    """All of act(gate) * up and the product after it but that product itself.

    Its first result has the shape of the product and no values: its gradient is that of the product. It is followed by
    a (..., I) and U, which are no results to autograd. Keeps gate, up and U.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, activation: str, down: Linear, *_: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        room = 0 if down.a is None else len(down.a)
        whole = ops.gated(gate, up, activation, room)
        a: Any = whole[..., : gate.shape[-1]]
        a.room = room
        with lora.without_autocast(gate):
            low = low_rank(a, [down])
        ctx.activation, ctx.down = activation, down
        ctx.save_for_backward(gate, up, low)
        ctx.mark_non_differentiable(a, low)
        return gate.new_empty(()).expand(*gate.shape[:-1], down.outputs), a, low

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        gate, up, low = ctx.saved_tensors
        down = [ctx.down]
        with lora.without_autocast(gate):
            outer = [rows(dy)]
            s = low_rank_gradient(outer, down)
            a = input_gradient(outer, s, down).view(gate.shape)
            ops.gated_backward_(a, gate, up, ctx.activation)  # the gradient becomes a, and gate and up their gradients
            return gate, up, None, None, *factor_gradients(rows(a), low, outer, s, down)


class _Down(torch.autograd.Function):
    """The last product, for the function before it."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, a: Tensor, low: Tensor, down: Linear) -> Tensor:
        with lora.without_autocast(a):
            return lora.products(a, low, [down])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, None, None


def _inner(module: nn.Module) -> tuple[str, ...]:
    """The names of the layers before the activation; none for what is no gated MLP."""
    return next((names for names in (_APART, _JOINED) if all(hasattr(module, name) for name in names)), ())


def _activation(module: nn.Module) -> str | None:
    """The activation of an MLP, by name, found by trying its code on layers of one line; None for another formula."""
    x = torch.linspace(-4, 4, 32, dtype=torch.float64)
    gate, up, down = 1.5 * x, x + 0.5, 3.0
    tried = _Tried(module)
    if _inner(module) == _APART:
        tried.gate_proj, tried.up_proj = lambda x: gate, lambda x: up
    else:
        tried.gate_up_proj = lambda x: torch.cat([gate, up], dim=-1)
    tried.down_proj = lambda a: down * a
    try:
        found = type(module).forward(tried, x)
    except Exception:  # of whatever kind: it is the model's code
        return None
    expected = {name: down * activate(gate) * up for name, activate in _PLAIN.items()}
    return next((name for name, values in expected.items() if torch.allclose(found, values, rtol=1e-9)), None)


class _Tried:
    """A module with other layers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
