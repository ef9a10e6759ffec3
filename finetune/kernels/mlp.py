"""A gated MLP, down(act(gate(x)) * up(x)), with gate and up in one layer or in two (SwiGLU, GeGLU: arXiv 2002.05202).

Kept for the backward pass: x with its U, gate and up. What follows them stands in a function of its own that keeps
nothing, and hands its gradient to the one before: the recomputation of a checkpointed layer ends once all that was kept
is there again, and so before the activation and the last product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.kernels import lora, ops
from finetune.kernels.lora import Backward, Linear, low_rank, rows

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
        handle = _Kept.apply(gate, up, activation, down, *lora.factors([down]))
        y: Tensor = _Down.apply(handle, gate.detach(), up.detach(), activation, down)
        return y

    return lora.put(module, forward)


class _Kept(torch.autograd.Function):
    """The whole of down(act(gate) * up) to autograd: keeps gate and up, and has its backward pass.

    The result has the shape of that product and no values, which `_Down` computes.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str, down: Linear, *_: Tensor) -> Tensor:
        ctx.activation, ctx.down = activation, down
        ctx.save_for_backward(gate, up)
        return gate.new_empty(()).expand(*gate.shape[:-1], down.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        down = [ctx.down]
        with lora.without_autocast(gate):
            back = Backward.of(down, [dy])
            a = back.of_input()
            # The gradient becomes a, and gate and up become their gradients.
            ops.gated_backward_(a.view(gate.shape), gate, up, ctx.activation)
            return gate, up, None, None, *back.of_factors(a, low_rank(a, back.a, down))


class _Down(torch.autograd.Function):
    """The values of the product; its gradient is that of `_Kept`."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, gate: Tensor, up: Tensor, activation: str, down: Linear) -> Tensor:
        a = ops.gated(gate, up, activation, lora.rank([down]))
        with lora.without_autocast(gate):
            (y,), _ = lora.products(rows(a), [down])
        return y.view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, None, None, None


def _inner(module: nn.Module) -> tuple[str, ...]:
    """The names of the layers before the activation; none for what is no gated MLP."""
    return next((names for names in (_APART, _JOINED) if all(hasattr(module, name) for name in names)), ())


def _activation(module: nn.Module) -> str | None:
    """The activation of an MLP, by name, found by trying its code on layers of one line; None for another formula."""
    x = torch.linspace(-4, 4, 32, dtype=torch.float64)
    gate, up, down = 1.5 * x, x + 0.5, 3.0
    own: dict[str, Callable[[Tensor], Tensor]] = {
        "gate_proj": lambda x: gate,
        "up_proj": lambda x: up,
        "gate_up_proj": lambda x: torch.cat([gate, up], dim=-1),
        "down_proj": lambda a: down * a,
    }
    try:
        found = type(module).forward(_Tried(module, own), x)
    except Exception:  # of whatever kind: it is the model's code
        return None
    expected = {name: down * activate(gate) * up for name, activate in _PLAIN.items()}
    return next((name for name, values in expected.items() if torch.allclose(found, values, rtol=1e-9)), None)


class _Tried:
    """A module with other layers."""

    def __init__(self, module: nn.Module, own: Mapping[str, Any]) -> None:
        vars(self).update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
