"""Adapted layers that compute with the values of a served format: their update is rounded with the weight.

With the weight of a layer stored as in `structure.fixed_point`, W^ the values nearest to W + kappa B A, n tokens and
rank r:

    Y = X W^T,    dX = dY W^,    dB = kappa dY^T (X A^T),    dA = kappa (dY B)^T X

The rounding counts as the identity for gradients, also of values beyond the outermost levels (the straight-through
estimator, arXiv 1308.3432), so there is no gradient of the size of W. W^ is not kept: the backward pass makes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import layer as peft_layer
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.model.structure import fixed_point, packed
from finetune.runtime import patches


class ExactLinear(peft_layer.Linear):
    """PEFT's layer, with the same tensors, on a weight stored as positions between the levels of a format."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = self.base_layer.bias
        output: torch.Tensor = _RoundedProduct.apply(
            x, None if bias is None else bias.to(x.dtype), self.base_layer.weight, *update_of(self)
        )
        return output


def attach(model: nn.Module) -> None:
    """Let the layers of `model` that PEFT has adapted compute with rounded weights where these are stored so."""
    for module in model.modules():
        if type(module) is peft_layer.Linear and fixed_point.of(module.base_layer.weight):
            patches.MODULE_FORWARD.put(ExactLinear, module)


def update_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A (r, in_features), B (out_features, r) and kappa of an adapted layer: 0 if its adapter is disabled."""
    (name,) = layer.active_adapters
    kappa = 0.0 if layer.disable_adapters else layer.scaling[name]
    return layer.lora_A[name].weight, layer.lora_B[name].weight, kappa


@torch.no_grad()
def as_served(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The packed parameters of a PeftModel's base by their names there, with the values that the model computes with:
    those that were stored as positions in the format itself.
    """
    base = model.get_base_model()
    adapted = {f"{path}.base_layer": layer for path, layer in base.named_modules() if isinstance(layer, ExactLinear)}
    for path, module in base.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if packed.packing_of(parameter):
                update = None
                if path in adapted:
                    a, b, kappa = update_of(adapted[path])
                    update = a.float(), b.float(), kappa
                yield f"{path.removesuffix('.base_layer')}.{own}", packed.as_served(parameter, update)


class _RoundedProduct(torch.autograd.Function):
    """Saves X, A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: Any, a: torch.Tensor, b: torch.Tensor,
        kappa: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, a, b)
        ctx.weight, ctx.kappa = weight, kappa
        return functional.linear(x, rounded(weight, a, b, kappa, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = gradient @ rounded(ctx.weight, a, b, ctx.kappa, gradient.dtype)
        rows, outer = x.flatten(0, -2), gradient.flatten(0, -2)
        down, up = a.to(x.dtype), b.to(x.dtype)
        da = (outer @ up).t() @ rows
        db = outer.t() @ (rows @ down.t())
        return dx, None, None, da.to(a.dtype) * ctx.kappa, db.to(b.dtype) * ctx.kappa, None


def rounded(weight: Any, a: torch.Tensor, b: torch.Tensor, kappa: float, dtype: torch.dtype) -> torch.Tensor:
    """W^ (out_features, in_features) in `dtype`."""
    how, positions = packed.packing_of(weight), fixed_point.of(weight)
    assert how is not None
    assert positions is not None
    out = torch.empty(how.shape, dtype=dtype, device=weight.device)
    grid = positions.grid(how.scales, how.shape[-1])
    positions.snap_(weight.data, grid, out, a.detach().float(), b.detach().float(), kappa)
    return out
