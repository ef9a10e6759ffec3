"""A gated MLP, down(act(gate(x)) * up(x)), with gate and up in one layer or in two (SwiGLU, GeGLU: arXiv 2002.05202).

Kept for the backward pass: x with its U, gate and up. It is split into two autograd functions, one that has all of the
graph and one that has all of the values after gate and up:

    forward    x, gate, up -> _Graph -> placeholder (a shape without values) -> _Output -> y
                              keeps them                                        computes y, keeps nothing
    backward   dx <---------- _Graph <----------------- dy -------------------- _Output <- dy

The recomputation of a checkpointed layer ends once everything that was kept is there again: so it ends at `_Graph`, and
neither the activation nor the last product is computed again. What the last product's adapter took, its U, is small and
stays from the first time.

A long input is taken in tiles where its layer is recomputed anyway: then x alone is kept, and gate and up are computed
again by the backward pass, tile by tile, instead of by the recomputation, which ends before them (unless a norm follows
the MLP, as in Gemma 2). No tensor is as wide as gate and up and as long as the input, and each weight is decoded
once for all tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.kernels import lora, ops
from finetune.kernels.lora import Backward, FrozenLinear, Layers, rows
from finetune.model.distributed.placement import is_divided
from finetune.model.recompute import keeping

# The names of the layers in transformers: gate and up apart, or as one layer.
_APART, _JOINED, _DOWN = ("gate_proj", "up_proj"), ("gate_up_proj",), "down_proj"
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def has_structure(module: nn.Module) -> bool:
    """Whether `module` has the layers of a gated MLP, at least one of them adapted."""
    if not _inner(module) or not hasattr(module, _DOWN):
        return False
    parts = layers(module)
    return all(isinstance(part, nn.Module) for part in parts) and any(map(lora.is_adapted, parts))


def layers(module: nn.Module) -> list[nn.Module]:
    """The linear layers of a gated MLP in the order of computation: `down_proj` is the last."""
    return [getattr(module, name) for name in (*_inner(module), _DOWN)]


def obstacle(module: nn.Module) -> str | None:
    """The reason why the module cannot be fused; None if it can."""
    *inner, down = layers(module)
    reason = lora.obstacle_together(inner) or lora.obstacle(down)
    return reason or (None if _activation(module) else "another activation or another formula")


def replace(module: nn.Module) -> Callable[[], None]:
    """Compute the MLP by these functions; returns a function that undoes it."""
    plain, activation, parts = module.forward, _activation(module), layers(module)
    assert activation is not None

    def forward(x: Tensor) -> Tensor:
        if not lora.ready(x, parts):
            computed: Tensor = plain(x)
            return computed
        *inner, down = map(lora.current, parts)
        if _in_tiles(x):
            return _computed(_InTiles(activation, inner, down, x.dtype), x)
        with torch.no_grad():
            hidden, low = lora.values(x, inner)
        return _computed(_Whole(activation, inner, down, x), x, low, *hidden)

    return lora.put(module, forward)


def tile(module: nn.Module) -> None:
    """Let an MLP that its own code computes take long inputs in tiles, if it treats each token by itself.

    One with dropout is left alone (each tile would draw other random numbers), and one whose weights ranks divide too.
    """
    drops_out = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
    if drops_out or not _activation(module) or any(map(is_divided, module.parameters())):
        return
    plain = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or torch.compiler.is_compiling() or not _in_tiles(x):
            computed: Tensor = plain(x, *args, **kwargs)
            return computed
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        return _computed(_OwnCodeInTiles(plain, layers(module)[-1].out_features, trained, x), x)

    lora.put(module, forward)


def _computed(formula: _Formula, *inputs: Tensor) -> Tensor:
    """The output of an MLP by `formula`, from what its backward pass keeps."""
    placeholder = _Graph.apply(formula, len(inputs), *inputs, *formula.trained)
    output: Tensor = _Output.apply(placeholder, formula, *(tensor.detach() for tensor in inputs))
    return output


class _Graph(torch.autograd.Function):
    """The MLP to autograd: keeps the inputs of `formula` and computes gradients; the output has a shape, no values."""

    @staticmethod
    def forward(ctx: Any, formula: _Formula, count: int, *tensors: Tensor) -> Tensor:
        ctx.formula = formula
        inputs = tensors[:count]
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty((), dtype=formula.dtype).expand(*inputs[0].shape[:-1], formula.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.formula.gradients(dy, *ctx.saved_tensors)


class _Output(torch.autograd.Function):
    """The values of the output: keeps nothing, and hands its gradient to `_Graph`."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, formula: _Formula, *inputs: Tensor) -> Tensor:
        ctx.inputs = len(inputs)
        output = formula.values(*inputs)
        return output.data  # not a view, because autograd would not let a model add to one in place, as Llama 4 does

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, *[None] * ctx.inputs


class _Formula(Protocol):
    """An MLP's function of tensors that are kept for its backward pass; they and the output are (..., width).

    `gradients` are those of the kept tensors and then of the `trained` weights, from `dy`, that of the output, whose
    type is `dtype` and width `outputs`.
    """

    trained: Sequence[Tensor]
    dtype: torch.dtype
    outputs: int

    def values(self, *kept: Tensor) -> Tensor: ...
    def gradients(self, dy: Tensor, *kept: Tensor) -> list[Tensor]: ...


class _Whole:
    """The MLP with x (..., H), its U (n, R), and gate and up, together or apart, kept."""

    def __init__(self, activation: str, inner: Layers, down: FrozenLinear, x: Tensor) -> None:
        self._activation, self._inner, self._down, self._needs_dx = activation, inner, down, x.requires_grad
        self.trained: Sequence[Tensor] = lora.factors([*inner, down])
        self.dtype, self.outputs = x.dtype, down.outputs
        self._low_of_down: Tensor | None = None

    def values(self, x: Tensor, low: Tensor, *hidden: Tensor) -> Tensor:
        with lora.without_autocast(x):
            a = _activated(hidden, self._activation, self._down)
            (y,), low_of_down = lora.products(a, [self._down], holds_low=True)
            self._low_of_down = low_of_down.contiguous()  # not as a view, so that `a` is freed
        return y.view(*x.shape[:-1], -1)

    def gradients(self, dy: Tensor, x: Tensor, low: Tensor, *hidden: Tensor) -> list[Any]:
        assert self._low_of_down is not None
        with lora.without_autocast(x):
            back, of_b, of_down = _backward_(
                hidden, self._activation, self._inner, self._down, dy, low, self._low_of_down
            )  # fmt: skip
            dx = back.of_input().view(x.shape) if self._needs_dx else None
            of_inner = lora.paired(back.of_a(rows(x)), of_b)
        return [dx, None, *[None] * len(hidden), *of_inner, *of_down]


class _InTiles:
    """The whole MLP of a long input, which alone is kept, by tiles."""

    def __init__(self, activation: str, inner: Layers, down: FrozenLinear, dtype: torch.dtype) -> None:
        self._activation, self._layers = activation, [*inner, down]
        self.trained: Sequence[Tensor] = lora.factors(self._layers)
        self.dtype, self.outputs = dtype, down.outputs

    def values(self, x: Tensor) -> Tensor:
        y = x.new_empty(*x.shape[:-1], self.outputs)
        with lora.without_autocast(x):
            *inner, down = (layer.decoded_once(x.dtype) for layer in self._layers)
            for x_tile, y_tile in _tiles(x, y):
                hidden, _ = lora.products(x_tile, inner)
                lora.products(_activated(hidden, self._activation, down), [down], y_tile, holds_low=True)
        return y

    def gradients(self, dy: Tensor, x: Tensor) -> list[Tensor]:
        dx, sums = x.new_empty(x.shape), _sums(self.trained)
        with lora.without_autocast(x):
            *inner, down = (layer.decoded_once(x.dtype) for layer in self._layers)
            for x_tile, dy_tile, dx_tile in _tiles(x, dy, dx):
                hidden, low = lora.products(x_tile, inner)
                low_of_down = _activated(hidden, self._activation, down)[:, down.inputs :].contiguous()
                back, of_b, of_down = _backward_(
                    hidden, self._activation, inner, down, dy_tile, low, low_of_down
                )  # fmt: skip
                back.of_input(dx_tile)
                _add_(sums, [*lora.paired(back.of_a(x_tile), of_b), *of_down])
        return [dx, *_as_trained(sums, self.trained)]


class _OwnCodeInTiles:
    """The same for an MLP computed by its own code, whose graph is made and used again tile by tile."""

    def __init__(self, plain: Callable[[Tensor], Tensor], outputs: int, trained: Sequence[Tensor], x: Tensor) -> None:
        self._plain, self._autocast = plain, _autocast(x)
        self.trained, self.outputs = trained, outputs
        self.dtype: torch.dtype = self._autocast["dtype"] if self._autocast["enabled"] else x.dtype

    def values(self, x: Tensor) -> Tensor:
        y = x.new_empty((*x.shape[:-1], self.outputs), dtype=self.dtype)
        with torch.autocast(**self._autocast):
            for x_tile, y_tile in _tiles(x, y):
                y_tile.copy_(self._plain(x_tile))
        return y

    def gradients(self, dy: Tensor, x: Tensor) -> list[Tensor]:
        dx, sums = x.new_empty(x.shape), _sums(self.trained)
        with torch.enable_grad(), torch.autocast(**self._autocast):
            for x_tile, dy_tile, dx_tile in _tiles(x, dy, dx):
                given = x_tile.detach().requires_grad_()
                of_x, *parts = torch.autograd.grad(self._plain(given), [given, *self.trained], dy_tile)
                dx_tile.copy_(of_x)
                _add_(sums, parts)
        return [dx, *_as_trained(sums, self.trained)]


def _sums(trained: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of zero in float32, in which those of tiles are summed."""
    return [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]


def _add_(sums: list[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(sums, parts, strict=True):
        total += part


def _as_trained(sums: list[Tensor], trained: Sequence[Tensor]) -> list[Tensor]:
    return [total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True)]


def _autocast(x: Tensor) -> dict[str, Any]:
    """The arguments of the autocast in force, without its cache: cached copies would belong to one tile's graph."""
    kind = x.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return {"device_type": kind, "enabled": enabled, "dtype": dtype, "cache_enabled": False}


_LEAST = 2048
"""Fewest tokens of a tile: with fewer, products of a narrow model would not keep a GPU busy."""
_MANY = 4
"""Fewest tiles of an input that is taken in tiles."""


def _in_tiles(x: Tensor) -> bool:
    """Whether x (..., H) is long and gate and up need not be kept: recomputed, or without a backward pass."""
    long = x.numel() >= _MANY * _tile(x) * x.shape[-1] and not keeping.keeps_products()
    return long and (not torch.is_grad_enabled() or keeping.is_recomputed())


def _tile(x: Tensor) -> int:
    """The tokens of a tile: as many as x (..., H) is wide, so that gate and up take as much as the decoded weights."""
    return max(x.shape[-1], _LEAST)


def _tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors (..., width), the input first, into tiles (n, width)."""
    return zip(*(rows(tensor).split(_tile(tensors[0])) for tensor in tensors), strict=True)


def _halves(hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gate and up from the outputs of one joint layer, or of two."""
    gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, dim=-1)
    return gate, up


def _activated(hidden: Sequence[Tensor], activation: str, down: FrozenLinear) -> Tensor:
    """What `down` takes (n, width and room), with its U beside it."""
    a = None if down.a is None else down.a.detach().to(hidden[0].dtype)
    return rows(ops.gated(*_halves(hidden), activation, lora.rank([down]), a, down.scale))


def _backward_(
    hidden: Sequence[Tensor], activation: str, inner: Layers, down: FrozenLinear, dy: Tensor, low: Tensor,
    low_of_down: Tensor,
) -> tuple[Backward, list[Tensor], list[Tensor]]:  # fmt: skip
    """Replace gate and up, the `hidden` tensors, by their gradients. `low` and `low_of_down` are U of inner and down.

    Returns the backward pass of `inner` from there, dB of its adapted layers, and the gradients of down's factors.
    """
    gate, up = _halves(hidden)
    of_down = Backward.of([down], [dy])
    lows = [low[:, own] for own in lora.columns_of(inner)]
    of_a, of_gate, of_up = ops.gated_backward_(
        gate, up, of_down.of_input().view(gate.shape), activation, of_down.s, lows[0], lows[-1],
        lora.factors([*inner, down])[0].dtype,
    )  # fmt: skip
    of_b = [of_gate, of_up] if len(inner) == 2 else [torch.cat([of_gate, of_up])]
    return (
        Backward.of(inner, hidden),
        [one for one, layer in zip(of_b, inner, strict=True) if layer.b is not None],
        [] if down.a is None else [of_a, *of_down.of_b(low_of_down)],
    )


def _inner(module: nn.Module) -> tuple[str, ...]:
    """The names of the layers before the activation; empty unless the module is a gated MLP."""
    return next((names for names in (_APART, _JOINED) if all(hasattr(module, name) for name in names)), ())


def _activation(module: nn.Module) -> str | None:
    """The name of an MLP's activation, found by running its code with known gate, up and down; None if none fits."""
    x = torch.linspace(-4, 4, 32, dtype=torch.float64)
    gate, up, down = 1.5 * x, x + 0.5, 3.0
    own: dict[str, Any] = {
        "training": True,  # dropout in its code is another formula
        "gate_proj": lambda x: gate,
        "up_proj": lambda x: up,
        "gate_up_proj": lambda x: torch.cat([gate, up], dim=-1),
        "down_proj": lambda a: down * a,
    }
    try:
        with torch.random.fork_rng([]):
            output = type(module).forward(_WithLayers(module, own), x)
    except Exception:  # the model's code may raise anything
        return None
    expected = {name: down * activate(gate) * up for name, activate in _PLAIN.items()}
    return next((name for name, values in expected.items() if torch.allclose(output, values, rtol=1e-9)), None)


class _WithLayers:
    """A stand-in for a module: `own` in place of its layers, everything else its own."""

    def __init__(self, module: nn.Module, own: Mapping[str, Any]) -> None:
        vars(self).update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
