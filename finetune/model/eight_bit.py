"""8-bit weights and 16-bit arithmetic: one rule for every device, in training, evaluation and generation.

bitsandbytes 0.50 also quantizes the inputs of its 8-bit layers (`MatMul8bitLt`), with one scale per token: on CUDA
always, on a CPU outside training. An outlier feature then costs all others their precision (arXiv 2208.07339,
section 3), and an evaluation does not compute what the training step does. Here only weights are quantized; see
docs/memory.md for what that costs.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class WeightOnly(bnb.nn.Linear8bitLt):
    """A linear layer whose frozen weight is dequantized for each product, to the type that the product is made in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (..., inputs) to (..., outputs)."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product: torch.Tensor = _Product.apply(x, self.weight.data, self.weight.SCB, bias)
        return product


def weight_only(model: nn.Module) -> None:
    """Give the 8-bit layers of `model` the forward pass of this module."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear8bitLt):
            module.__class__ = WeightOnly


def quantized(weight: torch.Tensor) -> Any:
    """`weight` (outputs, inputs) as a frozen 8-bit parameter on its device.

    `Int8Params.to` quantizes only what comes from a CPU, and leaves a weight that is on a card already in 16 bit.
    """
    codes, scales = quantize(weight)
    return bnb.nn.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers (outputs, inputs) and the largest magnitude of each row (outputs), by way of float16 as bitsandbytes."""
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
    return codes, scales


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.to(dtype).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


class _Product(torch.autograd.Function):
    """Keeps neither its input nor the dequantized weight, which is dequantized again for the backward pass.

    `MatMul8bitFp` of bitsandbytes 0.50 computes the same and holds on to its input, which a frozen weight never needs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.weight = codes, scales
        return functional.linear(x, _dequantized(codes, scales, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, scales = ctx.weight
        return gradient @ _dequantized(codes, scales, gradient.dtype), None, None, None
