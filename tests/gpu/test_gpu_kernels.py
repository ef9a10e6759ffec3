"""The fused path's operators on a CUDA device, beside their programs for the CPU, in the shapes of a large layer."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor

from finetune.kernels import ops
from finetune.model.structure import eight_bit

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, INNER = (96, 4096, 11008) if torch.cuda.is_available() else (8, 256, 320)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=["bfloat16", "float16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


def on(device: torch.device, *values: Any) -> list[Any]:
    """Arguments, tensors among them on `device`."""
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def exactly(operator: Any, *args: Any) -> Any:
    """What an operator computes in float32 on a CPU from the same values."""
    return ops.ON_CPU[operator.name()](*(arg.float() if isinstance(arg, Tensor) else arg for arg in args))


def assert_one_rounding(found: Tensor, exact: Tensor) -> None:
    error = 1e-5 if found.dtype is torch.float32 else torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.cpu().float(), exact.to(found.dtype).float(), rtol=error, atol=2e-5)


@pytest.mark.parametrize("shape", [(2, TOKENS, HIDDEN), (2, TOKENS, 8, 128)], ids=["hidden", "heads"])
def test_norms(cuda, dtype, shape) -> None:
    x, dy = torch.randn(2, *shape, dtype=dtype)
    weight = torch.randn(shape[-1], dtype=dtype)
    y, rstd = ops.rms_norm(*on(cuda, x, weight), 1e-6, 1.0, False, 16)
    assert_one_rounding(y[..., : shape[-1]], exactly(ops.rms_norm, x, weight, 1e-6, 1.0, False)[0])
    dx = ops.rms_norm_backward(*on(cuda, dy, x, weight), rstd, 1.0)
    assert_one_rounding(dx, exactly(ops.rms_norm_backward, dy, x, weight, rstd.cpu(), 1.0))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_rotation(cuda, dtype, backward) -> None:
    joint, angle = torch.randn(2, TOKENS, 48, 128, dtype=dtype), torch.randn(1, TOKENS, 64).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    found = joint.clone().to(cuda)
    ops.rope_(found[:, :, :32], found[:, :, 32:40], *on(cuda, cos, sin), backward)
    exact = joint.float()
    exactly(ops.rope_, exact[:, :, :32], exact[:, :, 32:40], cos, sin, backward)
    assert_one_rounding(found, exact)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gated_activations(cuda, on_card, dtype, activation) -> None:
    both, da = torch.randn(2, TOKENS, 2 * INNER, dtype=dtype), torch.randn(2, TOKENS, INNER, dtype=dtype)
    there, gradient = both.clone().to(cuda), da.clone().to(cuda)
    factor, lows = torch.randn(16, INNER, dtype=dtype), torch.randn(3, 2 * TOKENS, 16, dtype=dtype)
    a = ops.gated(*there.chunk(2, -1), activation, 16, factor.to(cuda))
    assert_one_rounding(a[..., :INNER], exactly(ops.gated, *both.chunk(2, -1), activation))
    sums = [(a[..., INNER : INNER + 16], a[..., :INNER].float() @ factor.to(cuda).float().t())]
    version = there._version
    found = ops.gated_backward_(*there.chunk(2, -1), gradient, activation, *lows.to(cuda), torch.float32)
    with on_card:
        assert there._version > version, "autograd sees that gate and up are changed"
    exact = both.float()
    exactly(ops.gated_backward_, *exact.chunk(2, -1), da.float(), activation, *lows.float(), torch.float32)
    assert_one_rounding(there, exact)
    products = [a[..., :INNER], *there.chunk(2, -1)]
    whole = [
        product.flatten(0, 1).float().t() @ low.to(cuda).float() for product, low in zip(products, lows, strict=True)
    ]
    sums += zip(found, [whole[0].t(), *whole[1:]], strict=True)
    for one, other in sums:
        with on_card:
            assert (one.float() - other).norm() <= torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("nf4", False), ("fp4", False)])
def test_4_bit_weights_to_the_bit(cuda, dtype, kind, nested) -> None:
    whole = torch.randn(256, HIDDEN, dtype=dtype)
    weight = bnb.nn.Params4bit(whole, requires_grad=False, quant_type=kind, compress_statistics=nested).to(cuda)
    assert_decoded(weight, bnb.functional.dequantize_4bit(weight.data, weight.quant_state))


def test_8_bit_weights_to_the_bit(cuda, dtype) -> None:
    weight = eight_bit.quantized(torch.randn(256, HIDDEN, dtype=dtype)).to(cuda)
    assert_decoded(weight, eight_bit.dequantized(weight.CB, weight.SCB, dtype))


def assert_decoded(weight: Tensor, expected: Tensor) -> None:
    out = torch.zeros(256, HIDDEN + 16, dtype=expected.dtype, device=expected.device)
    ops.decode_(out[:, :HIDDEN], weight)
    assert torch.equal(out[:, :HIDDEN], expected)
    assert not out[:, HIDDEN:].any()
