"""8-bit weights with 16-bit arithmetic, on every device, in training, evaluation and generation.

bitsandbytes 0.50 also quantizes the inputs of its 8-bit layers (`MatMul8bitLt`), with one scale per token: always on
CUDA, outside training on a CPU. One outlier feature then costs all others their precision (arXiv 2208.07339,
section 3), and evaluation computes something else than training. Here only weights are quantized; docs/memory.md has
the cost.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.runtime import patches


class WeightOnly(bnb.nn.Linear8bitLt):
    """A linear layer whose frozen weight is dequantized to the compute dtype for each product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, self.weight.data, self.weight.SCB, bias)


def weight_only(model: nn.Module) -> None:
    """Replace the forward pass of the 8-bit layers of `model` by that of `WeightOnly`."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear8bitLt):
            patches.LINEAR_8BIT.put(WeightOnly, module)


def quantized(weight: torch.Tensor) -> Any:
    """`weight` (out_features, in_features) as a frozen 8-bit parameter on the same device.

    `Int8Params.to` quantizes only when moving from a CPU; it leaves a weight that is already on a GPU in 16 bit.
    """
    codes, scales = quantize(weight)
    return bnb.nn.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (out_features, in_features) and absolute maxima per row (out_features); via float16, as in bitsandbytes."""
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
    return codes, scales


def dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out_features, in_features) in `dtype`, as each product has it."""
    return codes.to(dtype).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


class _Product(torch.autograd.Function):
    """Saves neither its input nor the dequantized weight, which is dequantized again in the backward pass.

    `MatMul8bitFp` of bitsandbytes 0.50 computes the same but saves its input, which a frozen weight does not need.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.weight = codes, scales
        return functional.linear(x, dequantized(codes, scales, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, scales = ctx.weight
        return gradient @ dequantized(codes, scales, gradient.dtype), None, None, None
