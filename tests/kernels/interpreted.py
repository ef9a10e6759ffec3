"""The Triton kernels in Triton's interpreter, beside the operators on a CPU: `test_triton_kernels.py` runs this file.

A process of its own, since Triton decides as it is imported whether functions are interpreted (TRITON_INTERPRET).
"""

from __future__ import annotations

from typing import Any

import pytest

from finetune.runtime import libraries

with libraries.importing():  # as the command line does
    import bitsandbytes as bnb
    import torch
    from torch import Tensor
    from triton import knobs
    from triton import language as tl
    from triton.runtime import interpreter

    from finetune.forms import FORMS, packed
    from finetune.kernels import decoding_kernels, ops, triton_kernels
    from finetune.model.structure import eight_bit

# Of tiles of 64 values: less than one, one, and more than one with a rest.
WIDTHS = [7, 64, 150]

dtypes = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)


@pytest.fixture(autouse=True)
def rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """To bfloat16 as a GPU rounds: the interpreter cuts the lower bits off (triton 3.9, `_convert_float`)."""
    assert knobs.runtime.interpret
    torch.manual_seed(0)
    plain = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return plain(values, source, target, mode)
        return torch.tensor(values).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(builder: Any, left: Any, right: Any, *others: Any) -> Any:
        left, right = (
            interpreter.TensorHandle(plain(each.data, each.dtype, tl.float32, None).view("float32"), tl.float32)
            if each.dtype == tl.bfloat16
            else each
            for each in (left, right)
        )
        return plain_dot(builder, left, right, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "_TILE", 64)


def strided(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., 2 : 2 + shape[-1]]


def four_bit(weight: Tensor, **options: Any) -> Tensor:
    return bnb.nn.Params4bit(weight, requires_grad=False, **options).to("cpu")


def decode(out: Tensor, weight: Tensor, *beside: Any) -> None:
    """`ops.decode_` with the kernels for its operators."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("decode_4bit_", "decode_int8_"):
            patch.setattr(ops, name, getattr(triton_kernels, name))
        patch.setattr(ops, "decode_packed_", decoding_kernels.decode_packed_)
        ops.decode_(out, weight, *beside)


def in_float32(program: Any, *args: Any) -> Any:
    """What an operator computes from the same values in float32, where it rounds nowhere between."""
    return program(*(arg.float() if isinstance(arg, Tensor) else arg for arg in args))


def assert_one_rounding(found: Tensor, exact: Tensor) -> None:
    """`found` is `exact` (float32) in its own type, or next to it where float32's own rounding decides.

    Far out, the float32 of a GELU has little left of 1 + erf(x): so many digits are as good as none.
    """
    error = 1e-5 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), exact.to(found.dtype).float(), rtol=error, atol=2e-5)


@dtypes
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("shape", "offset", "cast_first"),
    [((3, 5, 7), 0.0, True), ((2, 3, 4, 16), 0.0, False), ((2, 2, 150), 1.0, False)],
    ids=str,
)
def test_norms(dtype, shape, offset, cast_first) -> None:
    x, dy, weight = strided(*shape, dtype=dtype), strided(*shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    y, rstd = triton_kernels.rms_norm(x, weight, 1e-6, offset, cast_first, 3)
    expected, expected_rstd = ops.rms_norm(x, weight, 1e-6, offset, cast_first, 3)
    assert y.shape == expected.shape
    torch.testing.assert_close(rstd, expected_rstd)
    assert_one_rounding(y[..., : shape[-1]], expected[..., : shape[-1]].float())
    onto = strided(*shape, dtype=dtype)
    exact = in_float32(ops.rms_norm_backward, dy, x, weight, rstd, offset)
    for gradient in (dy, dy.transpose(0, -2).contiguous().transpose(0, -2)):  # also where tokens lie within heads
        dx = triton_kernels.rms_norm_backward(gradient, x, weight, rstd, offset)
        assert dx.dtype == dtype
        assert_one_rounding(dx, exact)
        dx = triton_kernels.rms_norm_backward(gradient, x, weight, rstd, offset, onto, 3)
        assert dx.shape == expected.shape
        assert_one_rounding(dx[..., : shape[-1]], exact + onto.float())


@dtypes
@pytest.mark.parametrize(
    ("heads", "size", "rotated"),
    [((4, 2), 16, 16), ((3, 3), 12, 12), ((11, 2), 24, 12)],  # of 4, 4 and 8 heads a tile
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.usefixtures("small_tiles")
def test_rotation(dtype, heads, size, rotated, backward) -> None:
    q, k = strided(2, 3, sum(heads), size, dtype=dtype).split(heads, 2)
    angle = torch.randn(2 if backward else 1, 3, rotated // 2).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = q.float(), k.float()
    ops.rope_(*expected, cos.float(), sin.float(), backward)
    triton_kernels.rope_(q, k, cos, sin, backward)
    assert_one_rounding(q, expected[0])
    assert_one_rounding(k, expected[1])


@dtypes
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, and the share of x to 0
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.usefixtures("small_tiles")
def test_gated_activations(dtype, activation, width) -> None:
    both, da = 4 * torch.randn(2, 2, 2 * width, dtype=dtype), strided(2, 2, width, dtype=dtype)
    gate, up = both.chunk(2, -1)
    found = triton_kernels.gated(gate, up, activation, 3)
    assert found.shape[-1] >= width + 3
    assert_one_rounding(found[..., :width], in_float32(ops.gated, gate, up, activation))
    no_factors = torch.empty(3, 4, 0, dtype=dtype)
    expected = [value.float().clone() for value in (gate, up)]
    ops.gated_backward_(*expected, da.float(), activation, *no_factors.float(), torch.float32)
    triton_kernels.gated_backward_(gate, up, da, activation, *no_factors, torch.float32)
    for value, exact in zip((gate, up), expected, strict=True):
        assert_one_rounding(value, exact)


@dtypes
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("ranks", "rows"), [((16, 4, 24), 20), ((130, 0, 64), 1)], ids=str)  # of 32 rows a tile
def test_products_with_factors_beside_gated_activations(dtype, ranks, rows) -> None:
    width = 75
    both, da = torch.randn(rows, 2, 2 * width, dtype=dtype), strided(rows, 2, width, dtype=dtype)
    gate, up = both.chunk(2, -1)
    s, of_gate, of_up = strided(2 * rows, sum(ranks), dtype=dtype).split(ranks, 1)
    factor = torch.randn(ranks[0], width, dtype=dtype)
    found, expected = (
        program(gate, up, "silu", ranks[0], factor, 0.3).float()[..., : width + ranks[0]]
        for program in (triton_kernels.gated, ops.gated)
    )
    assert_one_rounding(found[..., :width].to(dtype), in_float32(ops.gated, gate, up, "silu"))
    # Of rounded values the sums are the same but for their order.
    assert_sums(found[..., width:].to(dtype), 0.3 * found[..., :width] @ factor.float().t(), width)
    assert_sums(expected[..., width:].to(dtype), 0.3 * expected[..., :width] @ factor.float().t(), width)

    exact = [value.float().clone() for value in (gate, up)]
    a = in_float32(ops.gated, gate, up, "silu").to(dtype)
    ops.gated_backward_(*exact, da.float(), "silu", s.float(), of_gate.float(), of_up.float(), torch.float32)
    for wanted in (torch.float32, dtype):
        halves = [value.clone() for value in (gate, up)]
        sums = triton_kernels.gated_backward_(*halves, da, "silu", s, of_gate, of_up, wanted)
        for value, other in zip(halves, exact, strict=True):
            assert_one_rounding(value, other)
        dgate, dup = (value.flatten(0, 1).float() for value in halves)
        of_rounded = s.float().t() @ a.flatten(0, 1).float(), dgate.t() @ of_gate.float(), dup.t() @ of_up.float()
        for one, other in zip(sums, of_rounded, strict=True):
            assert one.dtype is wanted
            assert_sums(one, other, 2 * rows)


def assert_sums(found: Tensor, expected: Tensor, count: int) -> None:
    """Sums of `count` products, which float32 rounds in another order, and then `found`'s type."""
    error = torch.finfo(found.dtype).eps
    assert found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected, rtol=max(error, 1e-5), atol=1e-6 * count)


@dtypes
@pytest.mark.parametrize(
    ("kind", "nested", "shape", "size"),
    [("nf4", True, (48, 130), 64), ("nf4", False, (40, 128), 64), ("fp4", True, (9, 512), 256)],
    ids=str,
)
def test_4_bit_weights_to_the_bit(dtype, kind, nested, shape, size) -> None:
    weight = four_bit(torch.randn(shape, dtype=dtype), quant_type=kind, compress_statistics=nested, blocksize=size)
    found, expected = torch.zeros(2, shape[0], shape[1] + 5, dtype=dtype)[..., : shape[1]]
    ops.decode_(expected, weight)
    decode(found, weight)
    assert torch.equal(found, expected)


@dtypes
@pytest.mark.parametrize("factor", [torch.randn(130, 7), None], ids=["factor", "zeros"])
def test_a_factor_and_zeros_beside_a_4_bit_weight(dtype, factor) -> None:
    weight = four_bit(torch.randn(130, 192, dtype=dtype))
    found, expected = torch.ones(2, 130, 192 + 21, dtype=dtype)[..., : 192 + 20]
    ops.decode_(expected, weight, 192, factor, 5)
    decode(found, weight, 192, factor, 5)
    assert torch.equal(found, expected)


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.usefixtures("small_tiles")
def test_8_bit_weights_to_the_bit(dtype, width) -> None:
    weight = eight_bit.quantized(torch.randn(6, width))
    found, expected = torch.zeros(2, 6, width + 5, dtype=dtype)[..., :width]
    ops.decode_(expected, weight)
    decode(found, weight)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("size", [32, 4096])
def test_a_4_bit_weight_of_an_odd_width_in_blocks_small_and_large(kind, size) -> None:
    codes, absmax = torch.randint(16, (75 * 77 + 1,)), torch.rand(75 * 77 // size + 1)
    packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    found = torch.empty(75, 77)
    triton_kernels.decode_4bit_(found, packed, absmax, size, kind)
    expected = bnb.functional.get_4bit_type(kind, "cpu")[codes] * absmax.repeat_interleave(size)[: codes.numel()]
    assert torch.equal(found.flatten(), expected[:-1])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # scales of random bytes
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if form.module and form.codec.blocks.tile])
def test_packed_weights_to_the_bit(form) -> None:
    """Random bytes, in rows of a wider tensor and in experts whose values are read transposed."""
    rows = 130 if form == "fp8" else 33  # of which 128 share a scale; else programs and a part, of experts whole ones
    for shape in ((rows, 256), (2, 4, 512), *([(3, 200)] if form in ("mxfp4", "nvfp4", "fp8") else [])):
        parameter = packed.pack(form, torch.randn(shape))
        how = packed.packing_of(parameter)
        assert how is not None
        parameter.data.copy_(torch.randint(0, 256, parameter.shape, dtype=torch.uint8))
        if form == "mxfp4":
            how.scales.copy_(torch.randint(0, 256, how.scales.shape, dtype=torch.uint8))
        elif form == "nvfp4":
            how.scales[..., 8:] = torch.randint(0, 256, how.scales[..., 8:].shape, dtype=torch.uint8)
        dtype = torch.bfloat16 if len(shape) == 2 else torch.float32
        expected = torch.empty(shape, dtype=dtype)
        packed.decode(form, parameter.data, how.scales, expected)
        found = [strided(*shape, dtype=dtype), torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT]
        for out in found:
            decoding_kernels.decode_packed_(out, parameter.data, how.scales, form)
            same = out.contiguous().view(torch.uint8) == expected.view(torch.uint8)
            finite = expected.isfinite()
            assert finite.float().mean() > 0.7
            assert same.view(*shape, -1).all(-1)[finite].all()
            assert torch.equal(out.isnan(), expected.isnan())


FAR = 2**30
"""As many values between two rows that the third is further from the first than 32 bits can count."""


def far_apart(*shape: int) -> Tensor:
    """Values of three rows that lie as far apart. Only what is touched takes memory."""
    memory = torch.empty(2 * FAR + 2**16, dtype=torch.float16)
    rows = memory.as_strided((3, *shape), (FAR, *torch.empty(shape).stride()))
    return rows.copy_(torch.randn(3, *shape))


def test_rows_that_lie_further_apart_than_32_bits_reach() -> None:
    x, other, third, weight = far_apart(64), far_apart(64), far_apart(64), torch.randn(64).half()
    near = [values.clone() for values in (x, other, third)]
    y, rstd = triton_kernels.rms_norm(x, weight, 1e-6, room=FAR - 64)
    assert y.stride(0) == FAR
    torch.testing.assert_close(y[:, :64], ops.rms_norm(near[0], weight, 1e-6)[0])
    dx = triton_kernels.rms_norm_backward(other, x, weight, rstd, onto=third, room=FAR - 64)
    assert dx.stride(0) == FAR
    assert_one_rounding(dx[:, :64], in_float32(ops.rms_norm_backward, near[1], near[0], weight, rstd) + near[2].float())
    across = far_apart(2, 64).transpose(0, 1)
    for rows in (across, across.unsqueeze(-2)):
        found, expected = (module.rms_norm(rows, weight, 1e-6)[0] for module in (triton_kernels, ops))
        torch.testing.assert_close(found, expected)
    for factor in (None, torch.randn(2, 64).half()):
        y = triton_kernels.gated(x, other, "silu", FAR - 64, factor)
        assert y.stride(0) == FAR
        assert_one_rounding(y[:, :64], in_float32(ops.gated, near[0], near[1], "silu"))
    assert_sums(y[:, 64:66], y[:, :64].float() @ factor.float().t(), 64)
    left = torch.randn(3, 2).half()
    sums = triton_kernels.gated_backward_(x, other, third, "silu", left, left, left, torch.float32)
    exact = [values.float() for values in near]
    expected = ops.gated_backward_(*exact, "silu", *[left.float()] * 3, torch.float32)
    for found, one in zip((x, other), exact[:2], strict=True):
        assert_one_rounding(found, one)
    for found, one in zip(sums, expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-2, atol=1e-2)  # the factors of the sums are rounded

    q, k, angle = far_apart(3, 4, 16), far_apart(3, 2, 16), far_apart(3, 16)
    exact = [q.float(), k.float()]
    ops.rope_(*exact, angle.float(), angle.float())
    triton_kernels.rope_(q, k, angle, angle)
    assert_one_rounding(q, exact[0])
    assert_one_rounding(k, exact[1])

    half = torch.randn(3, 64).half()
    for quantized in (four_bit(half), eight_bit.quantized(half)):
        decode(x, quantized)
        ops.decode_(near[0], quantized)
        assert torch.equal(x, near[0])


@dtypes
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.usefixtures("small_tiles")
def test_logits(dtype: torch.dtype, softcap: float | None) -> None:
    """Two parts of the columns, the second in the larger first one's room, and labels in both and in neither."""
    words, constants = torch.randn(9, 250).to(dtype), (0.5, softcap, 1.4)
    labels, outer = 32 * torch.arange(9), torch.rand(9)
    folded = []
    for program in (triton_kernels, ops):
        sums = torch.zeros(3, 9)
        sums[0] = -torch.inf
        for start, end in ((0, 150), (150, 250)):
            program.fold_logits_(sums, words[:, start:end], labels, start, *constants)
        folded.append(sums)
    torch.testing.assert_close(*folded, rtol=1e-5, atol=1e-5)
    log_z = folded[1][1].log() + folded[1][0]
    made = []
    for program in (triton_kernels, ops):
        gradient = words.clone()
        for start, end in ((0, 150), (150, 250)):
            program.unfold_logits_(gradient[:, start:end], labels, log_z, outer, start, *constants)
        made.append(gradient)
    assert_one_rounding(made[0], made[1])
