"""A gated MLP, down(act(gate(x)) * up(x)), with gate and up in one layer or in two (SwiGLU, GeGLU: arXiv 2002.05202).

Kept for the backward pass: x with its U, gate and up. What follows them stands in a function of its own that keeps
nothing, and hands its gradient to the one before: the recomputation of a checkpointed layer ends once all that was kept
is there again, and so before the activation and the last product.

A long input is taken in tiles where its layer is recomputed anyway: then x alone is kept, and gate and up are computed
again by the backward pass, tile by tile, instead of by the recomputation, which ends before them (unless a norm follows
the MLP, as in Gemma 2). So no tensor is as wide as gate and up and as long as the input, and each weight is decoded
once for all tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.kernels import lora, ops
from finetune.kernels.lora import Backward, Layers, Linear, low_rank, rows
from finetune.model.recompute import keeping

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
        if _in_tiles(x):
            handle = _KeptInput.apply(x, activation, inner, down, *lora.factors([*inner, down]))
            in_tiles: Tensor = _Tiles.apply(handle, x.detach(), activation, inner, down)
            return in_tiles
        gate, up = _halves(lora.project(x, inner))
        handle = _Kept.apply(gate, up, activation, down, *lora.factors([down]))
        y: Tensor = _Down.apply(handle, gate.detach(), up.detach(), activation, down)
        return y

    return lora.put(module, forward)


def tile(module: nn.Module) -> None:
    """Take a long input in tiles where the MLP is computed by its own code, if that takes each token by itself.

    Not where adapters drop out, by other random numbers for each tile, nor in slices on several ranks.
    """
    from torch.distributed.tensor import DTensor

    drops_out = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
    if drops_out or not _activation(module) or any(isinstance(weight, DTensor) for weight in module.parameters()):
        return
    plain = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or torch.compiler.is_compiling() or not _in_tiles(x):
            computed: Tensor = plain(x, *args, **kwargs)
            return computed
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        handle = _KeptPlain.apply(x, layers(module)[-1].out_features, plain, *trained)
        in_tiles: Tensor = _PlainTiles.apply(handle, x.detach(), plain)
        return in_tiles

    lora.put(module, forward)


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
        with lora.without_autocast(gate):
            return gate, up, None, None, *_backward_(gate, up, ctx.activation, ctx.down, dy)


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


class _KeptInput(torch.autograd.Function):
    """The whole MLP to autograd, of a long input: keeps that, and has the backward pass. No values, as in `_Kept`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, inner: Layers, down: Linear, *_: Tensor) -> Tensor:
        ctx.activation, ctx.inner, ctx.down = activation, inner, down
        ctx.save_for_backward(x)
        return x.new_empty(()).expand(*x.shape[:-1], down.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        trained = lora.factors([*ctx.inner, ctx.down])
        dx, sums = x.new_empty(x.shape), [torch.zeros_like(factor, dtype=torch.float32) for factor in trained]
        with lora.without_autocast(x):
            *inner, down = (layer.decoded_once(x.dtype) for layer in (*ctx.inner, ctx.down))
            for x_tile, dy_tile, dx_tile in _tiles(x, dy, dx):
                hidden, low = lora.products(x_tile, inner)
                of_down = _backward_(*_halves(hidden), ctx.activation, down, dy_tile)
                back = Backward.of(inner, hidden)
                back.of_input(dx_tile)
                for gradient, part in zip(sums, [*back.of_factors(x_tile, low), *of_down], strict=True):
                    gradient += part
        return dx, None, None, None, *(each.to(factor.dtype) for each, factor in zip(sums, trained, strict=True))


class _Tiles(torch.autograd.Function):
    """The values of the MLP, a tile after the other; their gradient is that of `_KeptInput`."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, x: Tensor, activation: str, inner: Layers, down: Linear) -> Tensor:
        y = x.new_empty(*x.shape[:-1], down.outputs)
        with lora.without_autocast(x):
            *first, last = (layer.decoded_once(x.dtype) for layer in (*inner, down))
            for x_tile, y_tile in _tiles(x, y):
                hidden, _ = lora.products(x_tile, first)
                lora.products(ops.gated(*_halves(hidden), activation), [last], y_tile)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, None, None, None


class _KeptPlain(torch.autograd.Function):
    """The same for an MLP computed by its own code, whose graph is made and used again tile by tile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outputs: int, plain: Callable[[Tensor], Tensor], *trained: Tensor) -> Tensor:
        ctx.plain, ctx.trained, ctx.autocast = plain, trained, _autocast(x)
        ctx.save_for_backward(x)
        dtype = ctx.autocast["dtype"] if ctx.autocast["enabled"] else x.dtype
        return x.new_empty((), dtype=dtype).expand(*x.shape[:-1], outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        dx, sums = x.new_empty(x.shape), [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.trained]
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            for x_tile, dy_tile, dx_tile in _tiles(x, dy, dx):
                given = x_tile.detach().requires_grad_()
                of_x, *parts = torch.autograd.grad(ctx.plain(given), [given, *ctx.trained], dy_tile)
                dx_tile.copy_(of_x)
                for gradient, part in zip(sums, parts, strict=True):
                    gradient += part
        return dx, None, None, *(each.to(weight.dtype) for each, weight in zip(sums, ctx.trained, strict=True))


class _PlainTiles(torch.autograd.Function):
    """The values, a tile after the other; their gradient is that of `_KeptPlain`."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        y = kept.new_empty(kept.shape)
        with torch.autocast(**_autocast(x)):
            for x_tile, y_tile in _tiles(x, y):
                y_tile.copy_(plain(x_tile))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, None


def _autocast(x: Tensor) -> dict[str, Any]:
    """Autocast as it is now, but for its copies of weights, which would belong to the graph of one tile."""
    kind = x.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return {"device_type": kind, "enabled": enabled, "dtype": dtype, "cache_enabled": False}


_LEAST = 2048
"""Tokens of a tile at least: with fewer, products of a narrow model would not keep a GPU busy."""
_MANY = 4


def _in_tiles(x: Tensor) -> bool:
    """Whether x (..., H) is long, and neither gate nor up would be kept in any case."""
    long = x.numel() >= _MANY * _tile(x) * x.shape[-1] and not keeping.keeps_products()
    return long and (not torch.is_grad_enabled() or keeping.is_recomputed())


def _tile(x: Tensor) -> int:
    """The tokens of a tile: with so many as x (..., H) is wide, gate and up take as much as the decoded weights."""
    return max(x.shape[-1], _LEAST)


def _tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors (..., width) by tiles (n, width); the first is the input."""
    return zip(*(rows(tensor).split(_tile(tensors[0])) for tensor in tensors), strict=True)


def _halves(hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gate and up, from the outputs of the layers before the activation."""
    gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, dim=-1)
    return gate, up


def _backward_(gate: Tensor, up: Tensor, activation: str, down: Linear, dy: Tensor) -> list[Tensor]:
    """Turn gate and up into their gradients; returns those of the last layer's factors."""
    back = Backward.of([down], [dy])
    a = back.of_input()
    ops.gated_backward_(a.view(gate.shape), gate, up, activation)  # the gradient in `a` becomes a
    return back.of_factors(a, low_rank(a, back.a, [down]))


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
