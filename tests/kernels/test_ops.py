"""The fused path's operators on a CPU: what the modules of transformers compute, and shapes that a trace can trust."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from finetune.forms import packed
from finetune.kernels import ops
from finetune.model.structure import eight_bit

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A norm of each family: its class, what it adds to its weight, and whether it rounds before the product with it.
NORMS = [(LlamaRMSNorm, 0.0, True), (Gemma3RMSNorm, 1.0, False), (Olmo2RMSNorm, 0.0, False)]
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True, params=[2**16, 40], ids=["at once", "in blocks"])
def seeded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at once, and rows in blocks with a rest."""
    torch.manual_seed(0)
    monkeypatch.setattr(ops, "_BLOCK", request.param)


def strided(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values that lie in rows of a wider tensor, as those of one projection among several do."""
    return torch.randn(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., 2 : 2 + shape[-1]]


def assert_rounded(found: Tensor, exact: Tensor, terms: int = 1) -> None:
    """`found` is `exact` (float64) but for the rounding of its type, twice, and of a sum of so many `terms`."""
    assert found.dtype != torch.float64
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(found.dtype).eps, atol=2e-6 * terms)


def quantized(dtype: torch.dtype, kind: str, nested: bool, shape: tuple[int, int] = (48, 130)) -> Any:
    weight = torch.randn(shape, dtype=dtype)
    return bnb.nn.Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=nested).to("cpu")


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "offset", "cast_first"), NORMS, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 77), (2, 3, 4, 16)], ids=str)
def test_a_norm_is_the_modules_to_the_bit_and_its_gradient_exact(dtype, family, offset, cast_first, shape) -> None:
    norm = family(shape[-1]).to(dtype)
    nn.init.normal_(norm.weight)
    x, dy = strided(*shape, dtype=dtype), strided(*shape, dtype=dtype)
    y, rstd = ops.rms_norm(x, norm.weight.data, 1e-6, offset, cast_first)
    torch.testing.assert_close(y, norm(x).detach(), rtol=0, atol=0)

    exact = x.double().requires_grad_()
    factor = norm.weight.detach().double() + offset
    (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * factor).backward(dy.double())
    dx = ops.rms_norm_backward(dy, x, norm.weight.data, rstd, offset)
    assert_rounded(dx, exact.grad)
    assert torch.equal(ops.rms_norm_backward(dy, x, norm.weight.data, rstd, offset, dy), dx + dy), "as autograd adds"


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["whole", "partial"])
@pytest.mark.parametrize("rows", [1, 2], ids=["one position for all rows", "positions of its own each"])
def test_rotation_is_the_librarys_to_the_bit_and_turned_back_by_backward(dtype, share, rows) -> None:
    size, rotated = 16, int(16 * share)
    joint = strided(2, 7, 6, size, dtype=dtype)
    q, k = joint[:, :, :4], joint[:, :, 4:]
    angle = torch.randn(rows, 7, rotated // 2).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    exact = [value.double().requires_grad_() for value in (q, k)]
    turned = apply_rotary_pos_emb(*exact, cos.double(), sin.double(), unsqueeze_dim=2)
    torch.autograd.backward(turned, (dq.double(), dk.double()))

    ops.rope_(q, k, cos, sin)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    ops.rope_(dq, dk, cos, sin, backward=True)
    for found, leaf in zip((dq, dk), exact, strict=True):
        torch.testing.assert_close(found.double(), leaf.grad, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gated_activation_and_its_gradients_are_autograds(dtype, activation) -> None:
    both, da = torch.randn(3, 5, 66, dtype=dtype), strided(3, 5, 33, dtype=dtype)
    gate, up = (half.detach().requires_grad_() for half in both.chunk(2, -1))
    expected = ACTIVATIONS[activation](gate) * up
    expected.backward(da)
    with torch.no_grad():
        found = ops.gated(gate, up, activation)
        ops.gated_backward_(gate, up, da, activation, *torch.empty(3, 15, 0, dtype=dtype), dtype)
    # torch has two GELUs in float32, one for values that lie side by side (oneDNN's), apart by less than 1e-6.
    for value, exact in ((found, expected), (gate, gate.grad), (up, up.grad)):
        torch.testing.assert_close(value, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_gated_activation_and_its_gradients_are_multiplied_by_factors(dtype) -> None:
    gate, up, da = torch.randn(3, 3, 5, 33, dtype=dtype)
    factor, (s, of_gate, of_up) = torch.randn(4, 33, dtype=dtype), strided(15, 6, dtype=dtype).split((1, 3, 2), 1)
    wide, a = (ops.gated(gate, up, "silu", 4, *given) for given in ((factor, 0.5), ()))
    a = a[..., :33]
    assert torch.equal(wide[..., :33], a)
    assert_rounded(wide[..., 33:37], 0.5 * a.double() @ factor.double().t(), 33)
    sums = ops.gated_backward_(gate, up, da, "silu", s, of_gate, of_up, dtype)
    a, gate, up = (value.flatten(0, 1).double() for value in (a, gate, up))
    exact = s.double().t() @ a, gate.t() @ of_gate.double(), up.t() @ of_up.double()
    for found, one in zip(sums, exact, strict=True):
        assert_rounded(found, one, 15)


def test_two_products_side_by_side_are_those_apart(dtype) -> None:
    left, right = strided(5, 9, dtype=dtype), torch.randn(9, 7, dtype=dtype)
    found, expected = torch.empty(2, 5, 7, dtype=dtype)
    ops.multiply_joined_(found, left, right, 6)
    ops.multiply_(expected, left[:, 6:].contiguous(), right[6:])
    ops.add_product_(expected, left[:, :6].contiguous(), right[:6])
    assert torch.equal(found, expected)


def test_results_leave_room_for_further_columns(dtype) -> None:
    x, weight = torch.randn(3, 5, 12, dtype=dtype), torch.randn(12, dtype=dtype)
    for wide, exact in (
        (ops.rms_norm(x, weight, 1e-6, room=24)[0], ops.rms_norm(x, weight, 1e-6)[0]),
        (
            ops.rms_norm_backward(x, x, weight, x[..., 0].float(), 0.0, x, 24),
            ops.rms_norm_backward(x, x, weight, x[..., 0].float(), 0.0, x),
        ),
        (ops.gated(x, x, "silu", room=24), ops.gated(x, x, "silu")),
    ):
        assert wide.shape == (3, 5, 48), "rows begin at multiples of 16 values"
        torch.testing.assert_close(wide[..., :12], exact)
        assert not wide[..., 12:].any(), "as oneDNN multiplies it too with AMX"


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("shape", [(48, 130), (64, 320)], ids=str)
def test_a_4_bit_weight_decodes_to_bitsandbytes_values_beside_other_columns(dtype, kind, nested, shape) -> None:
    weight = quantized(dtype, kind, nested, shape)
    buffer = torch.zeros(shape[0], shape[1] + 3, dtype=dtype)
    ops.decode_(buffer[:, : shape[1]], weight)
    assert torch.equal(buffer[:, : shape[1]], bnb.functional.dequantize_4bit(weight.data, weight.quant_state))
    assert not buffer[:, shape[1] :].any()


@pytest.mark.parametrize("kind", ["nf4", "int8", "q4_0", "none"])
def test_a_factor_and_zeros_stand_beside_a_decoded_weight(dtype, kind) -> None:
    weight = torch.randn(6, 64, dtype=dtype)
    weight = {
        "nf4": lambda: quantized(dtype, "nf4", True, (6, 64)),
        "int8": lambda: eight_bit.quantized(weight),
        "q4_0": lambda: packed.pack("q4_0", weight),
    }.get(kind, lambda: weight)()
    out, alone, factor = torch.ones(6, 72, dtype=dtype), torch.empty(6, 64, dtype=dtype), torch.randn(6, 3)
    ops.decode_(out, weight, 64, factor, 2)
    ops.decode_(alone, weight)
    zeros = alone.new_zeros(6, 3)
    assert torch.equal(out, torch.cat([alone, zeros[:, :2], factor.to(dtype), zeros], dim=1))
    ops.decode_(out, weight, 64)
    assert torch.equal(out, torch.cat([alone, alone.new_zeros(6, 8)], dim=1))


def test_an_8_bit_and_a_16_bit_weight_decode_to_what_their_layers_multiply_by(dtype) -> None:
    weight = torch.randn(6, 32, dtype=dtype)
    eight = eight_bit.quantized(weight)
    out = torch.zeros(6, 40, dtype=dtype)[:, :32]
    ops.decode_(out, eight)
    assert torch.equal(out, eight_bit.dequantized(eight.CB, eight.SCB, dtype))
    ops.decode_(out, weight)
    assert torch.equal(out, weight)


# -- what torch is told of them ----------------------------------------------------------------------------------------


def calls(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each operator with arguments, rows of a wider tensor where it takes them."""
    x, weight, heads = strided(3, 5, 32, dtype=dtype), torch.randn(32, dtype=dtype), strided(2, 7, 6, 16, dtype=dtype)
    angle, nested = torch.randn(1, 7, 16, dtype=dtype), quantized(dtype, "nf4", nested=True)
    state, plain, eight = nested.quant_state, quantized(dtype, "fp4", nested=False), eight_bit.quantized(x[0])
    blocks: Any = packed.pack("q8_0", x[0])
    return {
        "rms_norm": (ops.rms_norm, (x, weight, 1e-6, 1.0, False)),
        "rms_norm_backward": (ops.rms_norm_backward, (x, x * 2, weight, torch.rand(3, 5), 1.0, x, 4)),
        "multiply_joined_": (ops.multiply_joined_, (x[0].clone(), x[0], torch.randn(32, 32, dtype=dtype), 24)),
        "rope_": (ops.rope_, (heads[:, :, :4], heads[:, :, 4:], angle, angle, True)),
        "gated": (ops.gated, (x, x * 2, "gelu")),
        "gated with a factor": (ops.gated, (x, x * 2, "silu", 2, x[0, :2], 0.5)),
        "gated_backward_": (ops.gated_backward_, (
            x, x * 2, x * 3, "silu", *strided(15, 6, dtype=dtype).split((1, 3, 2), 1), torch.float32
        )),
        "decode_4bit_ nested": (ops.decode_4bit_, (
            strided(48, 130, dtype=dtype), nested.data, state.absmax, 64, "nf4",
            state.state2.code, state.state2.absmax, state.offset, 256,
        )),
        "decode_4bit_ beside a factor": (ops.decode_4bit_, (
            strided(48, 150, dtype=dtype), plain.data, plain.quant_state.absmax, 64, "fp4", None, None, None, 256, 130,
            torch.randn(48, 4), 8,
        )),
        "decode_4bit_": (ops.decode_4bit_, (
            strided(48, 130, dtype=dtype), plain.data, plain.quant_state.absmax, 64, "fp4"
        )),
        "decode_int8_": (ops.decode_int8_, (strided(5, 32, dtype=dtype), eight.CB, eight.SCB)),
        "decode_packed_": (ops.decode_packed_, (
            strided(5, 32, dtype=dtype), blocks.data, blocks.packing.scales, "q8_0"
        )),
    }  # fmt: skip


at_once = pytest.mark.parametrize("seeded", [2**16], indirect=True, ids=["at once"])  # blocks change no shape


@at_once
@pytest.mark.long
def test_schemas_and_shapes_are_those_of_the_results(dtype, subtests) -> None:
    """Once for each operator; the others' shapes are compared below."""
    if dtype is torch.float32:
        for operator, args in dict(calls(dtype).values()).items():
            with subtests.test(operator.name()):
                torch.library.opcheck(operator, args)


@at_once
@pytest.mark.slow
def test_the_cpu_programs_of_operators_run_on_fake_tensors(dtype, subtests) -> None:
    for name, (operator, args) in calls(dtype).items():
        with subtests.test(name), FakeTensorMode() as mode:
            fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
            found, expected = ops.ON_CPU[operator.name()](*fakes), operator(*fakes)
            assert shapes(found) == shapes(expected)


def shapes(results: Any) -> list[Any]:
    """Shape, strides and type of each tensor that an operator returns."""
    several = results if isinstance(results, (tuple, list)) else [] if results is None else [results]
    return [(each.shape, each.stride(), each.dtype) for each in several]


def test_a_fake_result_has_the_room_that_a_real_one_has(dtype) -> None:
    x, weight = strided(3, 5, 12, dtype=dtype), torch.randn(12, dtype=dtype)
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(x), mode.from_tensor(weight)
        fake = [*ops.rms_norm(*fakes, 1e-6, room=4), ops.gated(fakes[0], fakes[0], "silu", room=4)]
    assert shapes(fake) == shapes([*ops.rms_norm(x, weight, 1e-6, room=4), ops.gated(x, x, "silu", room=4)])
