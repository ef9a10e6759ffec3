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

from finetune.model.adapters.expert_adapter import ParamWrapper
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
    """Let the layers and experts of `model` that PEFT has adapted compute with rounded weights where these are stored
    so.
    """
    for module in model.modules():
        if type(module) is peft_layer.Linear and fixed_point.of(module.base_layer.weight):
            patches.MODULE_FORWARD.put(ExactLinear, module)
        elif isinstance(module, ParamWrapper) and fixed_point.of(module.get_param()):
            module.round_with_base()


def update_of(layer: Any) -> fixed_point.Update:
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
    updates = {
        id(layer.get_param() if isinstance(layer, ParamWrapper) else layer.base_layer.weight): update
        for layer in base.modules()
        if (update := _update_rounded(layer))
    }
    for name, parameter in base.named_parameters():
        if packed.packing_of(parameter):
            yield name.replace(".base_layer", ""), packed.as_served(parameter, updates.get(id(parameter)))


def _update_rounded(layer: nn.Module) -> fixed_point.Update | None:
    """The update in float32 of an adapter that is rounded with its weight; None of other modules."""
    if isinstance(layer, ExactLinear):
        a, b, kappa = update_of(layer)
    elif isinstance(layer, ParamWrapper) and layer.rounded:
        a, b, kappa = layer.current_update()
    else:
        return None
    return a.float(), b.float(), kappa


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
        dx = gradient @ rounded(ctx.weight, a, b, ctx.kappa, gradient.dtype) if ctx.needs_input_grad[0] else None
        rows, outer = x.flatten(0, -2), gradient.flatten(0, -2)
        down, up = a.to(x.dtype), b.to(x.dtype)
        da = (outer @ up).t() @ rows
        db = outer.t() @ (rows @ down.t())
        return dx, None, None, da.to(a.dtype) * ctx.kappa, db.to(b.dtype) * ctx.kappa, None


def rounded(weight: Any, a: torch.Tensor, b: torch.Tensor, kappa: float, dtype: torch.dtype) -> torch.Tensor:
    """W^ (out_features, in_features) in `dtype`."""
    return fixed_point.rounded(weight, (a, b, kappa), dtype)
