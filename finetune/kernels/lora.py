"""Linear layers with LoRA (arXiv 2106.09685) from PEFT's own parameters, without PEFT's passes over activations.

For n tokens, H inputs, O outputs, rank r and scale s, with W (O, H), A (r, H) and B (O, r):

    Y = X Wᵀ + U Bᵀ,  U = s X Aᵀ;     S = s dY B,  dX = dY W + S A,  dA = Sᵀ X,  dB = dYᵀ U

Layers that take the same input are computed by one function, with U and S of all side by side. If X has room beside it
(`kernels.room`) and W must be decoded anyway, U is written there, and one product with [W | B] gives Y; in the same way
S stands beside dY, and one product with [W; A] gives dX. Otherwise U Bᵀ is written first and X Wᵀ added by its own
product, as S A before dY W: adding onto the larger of the two would round it twice, and read and write it once more.
Base weights are decoded for each product, in both directions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.kernels import ops
from finetune.kernels.room import take_room
from finetune.model.recompute import keeping
from finetune.runtime import patches


@dataclass(frozen=True)
class FrozenLinear:
    """The parameters of a frozen linear layer at the time of a call, and of its adapter, if any: A (r, H), B (O, r)."""

    weight: Any
    bias: Tensor | None
    inputs: int
    outputs: int
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """W (O, H) in `dtype`; the weight itself if it has that type.

        A new block is freed after its product, and the caching allocator hands it out again for the next: between
        products its memory serves others.
        """
        if self.weight.dtype is dtype:
            return self.weight.detach()
        out = torch.empty(self.outputs, self.inputs, dtype=dtype, device=self.weight.device)
        ops.decode_(out, self.weight)
        return out

    def decoded_once(self, dtype: torch.dtype) -> FrozenLinear:
        """The layer for many products: W in `dtype`; A and B in float32, in which their gradients are summed."""
        a, b = (None if one is None else one.float() for one in (self.a, self.b))
        return dataclasses.replace(self, weight=self.decoded(dtype), a=a, b=b)


Layers = Sequence[FrozenLinear]


# -- what PEFT's modules are -------------------------------------------------------------------------------------------


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` is PEFT's wrapper of a layer with a LoRA adapter; not that of experts, held in one parameter."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)


def obstacle(module: nn.Module) -> str | None:
    """Why a linear layer, adapted or not, cannot be computed here; None if it can."""
    base: Any = module
    if is_adapted(module):
        layer: Any = module
        active, base = layer.active_adapters, layer.get_base_layer()
        if not isinstance(base, nn.Linear):
            return f"an adapter on a {type(base).__name__}, which is no linear layer"
        if len(active) != 1 or set(layer.lora_A) != set(active):
            return "several adapters"
        (name,) = active
        if name in layer.lora_variant:
            return "DoRA" if layer.use_dora.get(name) else "a variant of LoRA"
        if not isinstance(layer.lora_dropout[name], nn.Identity):
            return "dropout"
        if layer.lora_bias.get(name) or any(
            type(one) is not nn.Linear for one in (layer.lora_A[name], layer.lora_B[name])
        ):
            return "an adapter with a bias"
        if base is not layer.base_layer or getattr(layer, "fan_in_fan_out", False):
            return "several adapters around one layer"
    if not isinstance(base, nn.Linear) or not hasattr(base, "weight"):
        return f"a {type(base).__name__}, which is no linear layer"
    if any(parameter.requires_grad for parameter in base.parameters()):
        return "a base weight that is trained"
    return None


def obstacle_together(modules: Sequence[nn.Module]) -> str | None:
    """Why linear layers of one input cannot be computed here together; None if they can."""
    if reason := next(filter(None, map(obstacle, modules)), None):
        return reason
    scales = {current(module).scale for module in modules if is_adapted(module)}
    return "adapters of several scales" if len(scales) > 1 else None


def current(module: Any) -> FrozenLinear:
    """The parameters that a linear layer, adapted or not, has now.

    An adapter that is disabled is scaled by zero, so that the base is computed in the same order of summation as with
    an adapter whose update is zero: the first step of a preference objective compares the two.
    """
    if not is_adapted(module):
        return FrozenLinear(module.weight, module.bias, module.in_features, module.out_features)
    (name,) = module.active_adapters
    base = module.base_layer
    return FrozenLinear(
        base.weight, base.bias, base.in_features, base.out_features,
        module.lora_A[name].weight, module.lora_B[name].weight,
        0.0 if module.disable_adapters else module.scaling[name],
    )  # fmt: skip


def ready(x: Tensor, modules: Sequence[Any]) -> bool:
    """Whether `modules` can compute `x` here now: it has the compute dtype, and no adapter is merged."""
    kind = x.device.type
    computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return x.dtype is computed and not any(is_adapted(module) and module.merged for module in modules)


def replace(module: Any) -> Callable[[], None]:
    """Compute one adapted layer here; returns a function that undoes it."""
    plain = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not ready(x, [module]):
            return plain(x, *args, **kwargs)
        return project(x, [current(module)])[0]

    return put(module, forward)


def put(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give one module another forward pass; returns what undoes it."""
    return patches.MODULE_FORWARD.put(forward, module)


# -- autograd ----------------------------------------------------------------------------------------------------------


def project(x: Tensor, layers: Layers) -> tuple[Tensor, ...]:
    """The outputs (..., O) of `layers` for one input (..., H)."""
    outputs: tuple[Tensor, ...] = _Project.apply(x, layers, *factors(layers))
    return outputs


class _Project(torch.autograd.Function):
    """Saves X and U for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Layers, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.layers = layers
        outputs, low = values(x, layers)
        ctx.save_for_backward(x, low)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, low = ctx.saved_tensors
        with without_autocast(x):
            back = Backward.of(ctx.layers, gradients)
            dx = back.of_input().view(x.shape) if ctx.needs_input_grad[0] else None
            return dx, None, *paired(back.of_a(rows(x)), back.of_b(low))


def values(x: Tensor, layers: Layers) -> tuple[tuple[Tensor, ...], Tensor]:
    """The outputs (..., O) of `layers` for x (..., H), and U (n, R); without a graph, and kept for a recomputation."""

    def compute() -> tuple[tuple[Tensor, ...], Tensor]:
        outputs, low = products(rows(x) if wide is None else wide, layers)
        # U may lie in the block of X, which must not stay with it.
        return outputs, low.contiguous() if keeping.keeps_products() else low

    with without_autocast(x):
        wide = take_room(x)
        outputs, low = keeping.kept(compute)
    # Tensors of their own and not views: work in place on one must not count as a change of the others.
    return tuple(output.view(*x.shape[:-1], -1).data for output in outputs), low.data


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which products have the types of their factors."""
    return torch.autocast(x.device.type, enabled=False)


def factors(layers: Layers) -> list[Tensor]:
    """A and B of each adapted layer: what the autograd functions are given to have gradients for."""
    return [factor for layer in layers for factor in (layer.a, layer.b) if factor is not None]


def paired(of_a: Sequence[Tensor], of_b: Sequence[Tensor]) -> Iterator[Tensor]:
    """Gradients of A and B in turn, as `factors` has them."""
    return itertools.chain.from_iterable(zip(of_a, of_b, strict=True))


def rows(x: Tensor) -> Tensor:
    """`x` (..., width) as (n, width)."""
    return x.reshape(-1, x.shape[-1])


def rank(layers: Layers) -> int:
    """The sum of all layers' ranks: the columns of U and S."""
    return columns_of(layers)[-1].stop


def products(
    x: Tensor, layers: Layers, out: Tensor | None = None, *, holds_low: bool = False
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """Y of each layer (n, O), all in one block (`out` if given), and U (n, R).

    `x` is (n, H), or (n, H + R rounded up to a multiple of 8, or more) with room for U, which stands there already if
    it `holds_low`.
    """
    inputs, columns = layers[0].inputs, _aligned(layers[0].inputs + rank(layers))
    decodes = any(layer.weight.dtype is not x.dtype for layer in layers)
    if x.shape[1] >= columns > inputs and decodes:
        return _joined_products(x[:, :columns], layers, out, holds_low)
    low = x[:, inputs : inputs + rank(layers)] if holds_low else None
    x = x[:, :inputs]
    a, b = _factors(x, layers, with_a=not holds_low)
    low = low_rank(x, a, layers) if low is None else low
    outputs = _split(_block(x, layers) if out is None else out, layers)
    for layer, output, own, upward in zip(layers, outputs, columns_of(layers), b, strict=True):
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        if upward is None:
            ops.multiply_(output, x, layer.decoded(x.dtype).t(), bias)
        else:
            ops.multiply_(output, low[:, own], upward.t(), bias)
            ops.add_product_(output, x, layer.decoded(x.dtype).t())
    return outputs, low


def _joined_products(
    x: Tensor, layers: Layers, out: Tensor | None, holds_low: bool
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """`products` as one product, [X | U] [W | B]ᵀ, with zeros in B for the ranks of other layers.

    For layers q and k of ranks 2 and 1, the second factor has the rows

        [ W_q | B_q B_q  0  ]
        [ W_k |  0   0  B_k ]

    and a column of zeros for each that aligns X's.
    """
    inputs, end_of_ranks = layers[0].inputs, layers[0].inputs + rank(layers)
    weight = x.new_empty(sum(layer.outputs for layer in layers), x.shape[1])
    if end_of_ranks < x.shape[1]:
        x[:, end_of_ranks:].zero_()
    parts = weight.split([layer.outputs for layer in layers])
    for layer, own, part in zip(layers, columns_of(layers), parts, strict=True):
        ops.decode_(part, layer.weight, inputs, None if layer.b is None else layer.b.detach(), own.start)
    low = x[:, inputs:end_of_ranks]
    if not holds_low:
        low_rank(x[:, :inputs], _factors(x, layers, with_b=False)[0], layers, low)
    bias = None
    if any(layer.bias is not None for layer in layers):
        bias = torch.cat([x.new_zeros(one.outputs) if one.bias is None else one.bias.to(x.dtype) for one in layers])
    y = _block(x, layers) if out is None else out
    ops.multiply_(y, x, weight.t(), bias)
    return _split(y, layers), low


def _block(x: Tensor, layers: Layers) -> Tensor:
    return x.new_empty(len(x), sum(layer.outputs for layer in layers))


def _split(y: Tensor, layers: Layers) -> tuple[Tensor, ...]:
    return y.split([layer.outputs for layer in layers], dim=1)


def low_rank(x: Tensor, a: Tensor, layers: Layers, low: Tensor | None = None) -> Tensor:
    """U = s X Aᵀ of all layers side by side (n, R), written into `low` if given; `a` is A of all layers (R, H)."""
    low = x.new_empty(len(x), len(a)) if low is None else low
    if len(a):
        ops.multiply_(low, x, a.t(), None, _scale(layers))
    return low


@dataclass(frozen=True)
class Backward:
    """The backward pass of layers for `outer`, the gradients dY of each (n, O): S, and A and B in its type."""

    layers: Layers
    outer: Sequence[Tensor]
    a: Tensor
    s: Tensor
    joined: Tensor | None

    @classmethod
    def of(cls, layers: Layers, gradients: Sequence[Tensor]) -> Backward:
        """Compute S from the gradients (..., O) of each layer's output.

        It stands beside dY of a single adapted layer whose weight must be decoded, if there is room.
        """
        outer, layer, joined = [rows(gradient) for gradient in gradients], layers[0], None
        if len(layers) == 1 and layer.a is not None and layer.weight.dtype is not gradients[0].dtype:
            end = layer.outputs + len(layer.a)
            wide = take_room(gradients[0])
            if wide is not None and wide.shape[1] >= _aligned(end):
                if end < _aligned(end):
                    wide[:, end : _aligned(end)].zero_()
                joined = wide[:, : _aligned(end)]  # dY and columns for S
        a, b = _factors(outer[0], layers, with_a=joined is None)
        s = outer[0].new_empty(len(outer[0]), len(a)) if joined is None else joined[:, layer.outputs :][:, : len(a)]
        for gradient, own, upward in zip(outer, columns_of(layers), b, strict=True):
            if upward is not None:
                ops.multiply_(s[:, own], gradient, upward, None, _scale(layers))
        return cls(layers, outer, a, s, joined)

    def of_input(self, out: Tensor | None = None) -> Tensor:
        """dX = S A + dY W (n, H), summed over the layers; written into `out` if given."""
        dx = self.s.new_empty(len(self.s), self.layers[0].inputs) if out is None else out
        if self.joined is not None:  # one product [dY | S] [W; A] of a single layer
            (layer,) = self.layers
            assert layer.a is not None
            weight = dx.new_empty(self.joined.shape[1], layer.inputs)
            ops.decode_(weight[: layer.outputs], layer.weight)
            weight[layer.outputs :][: len(layer.a)].copy_(layer.a.detach())
            if layer.outputs + len(layer.a) < len(weight):
                weight[layer.outputs + len(layer.a) :].zero_()
            ops.multiply_joined_(dx, self.joined, weight, layer.outputs)
            return dx
        write = ops.multiply_
        if len(self.a):
            write(dx, self.s, self.a)
            write = ops.add_product_
        for layer, gradient in zip(self.layers, self.outer, strict=True):
            write(dx, gradient, layer.decoded(dx.dtype))
            write = ops.add_product_
        return dx

    def of_a(self, x: Tensor) -> list[Tensor]:
        """dA = Sᵀ X of each adapted layer, in the type of A."""
        if not len(self.a):
            return []
        whole = ops.product(self.s.t(), x, factors(self.layers)[0].dtype)
        return [
            whole[own] for layer, own in zip(self.layers, columns_of(self.layers), strict=True) if layer.a is not None
        ]

    def of_b(self, low: Tensor) -> list[Tensor]:
        """dB = dYᵀ U of each adapted layer, in the type of B."""
        return [
            ops.product(outer.t(), low[:, own], layer.b.dtype)
            for layer, outer, own in zip(self.layers, self.outer, columns_of(self.layers), strict=True)
            if layer.b is not None
        ]


def _factors(
    like: Tensor, layers: Layers, *, with_a: bool = True, with_b: bool = True
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """A of all layers (R, H), and B of each (None without an adapter), in the type of `like`.

    Those that are not wanted have no values.
    """
    adapted = [(layer.a, layer.b, number) for number, layer in enumerate(layers) if layer.a is not None]
    a = like.new_empty(rank(layers), layers[0].inputs)
    b: list[Any] = [None] * len(layers)
    into, values = [], []
    if adapted and with_a:
        into, values = list(a.split([len(down) for down, _, _ in adapted])), [down for down, _, _ in adapted]
    for _, up, number in adapted if with_b else ():
        b[number] = torch.empty_like(up, dtype=like.dtype)
        into.append(b[number])
        values.append(up)
    if into:
        # In one launch, for which torch 2.13 has no public name (and ruff does not see it as private).
        torch._foreach_copy_(into, values)
    return a, b


def _aligned(columns: int) -> int:
    """`columns` rounded up to a multiple of 8: 16 bytes in 16 bit, which cuBLAS reads at once (its documentation,
    "Tensor Core Usage").
    """
    return -(-columns // 8) * 8


def _scale(layers: Layers) -> float:
    """The scale of the adapted layers, which is the same for all (`obstacle_together`)."""
    return next(layer.scale for layer in layers if layer.a is not None)


def columns_of(layers: Layers) -> list[slice]:
    """Each layer's columns in U and S."""
    ends = itertools.accumulate((0 if layer.a is None else len(layer.a) for layer in layers), initial=0)
    return [slice(start, end) for start, end in itertools.pairwise(ends)]
