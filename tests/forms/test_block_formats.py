"""Formats of blocks: decoded like llama.cpp to the bit, and searched with errors like its own."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Types

from finetune.export.gguf import gguf_recipes
from finetune.forms import FORMS, packed
from finetune.forms.codec import BytesAndScales, Codec

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")

COLUMNS = 512
GGUF = [name for name, form in FORMS.items() if form.is_of_gguf]
OTHERS = [name for name, form in FORMS.items() if form.is_of_safetensors]


def encoded(codec: Codec, weight: torch.Tensor, importance: torch.Tensor | None) -> BytesAndScales:
    """The bytes and scales of a weight, as the search finds them."""
    return codec.encoded(weight, codec.search(weight, importance))


def _library() -> Any:
    module = importlib.util.find_spec("xllamacpp.xllamacpp")
    return ctypes.CDLL(str(module and module.origin))


def decoded_by_ggml(name: str, stored: torch.Tensor) -> torch.Tensor:
    """The values (rows, COLUMNS) of bytes, by llama.cpp's function."""
    function = getattr(_library(), f"dequantize_row_{name.removeprefix('gguf_').replace('_k', '_K')}")
    out = torch.empty(len(stored), COLUMNS)
    function(ctypes.c_void_p(stored.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(out.numel()))
    return out


def quantized_by_ggml(name: str, weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """The bytes of a weight, by llama.cpp's search."""
    stored = torch.empty(FORMS[name].codec.shapes(weight.shape)[0], dtype=torch.uint8)
    given = None if importance is None else importance.data_ptr()
    gguf_recipes.function()(
        Types[name.removeprefix("gguf_").upper()], weight.data_ptr(), stored.data_ptr(), 0, *weight.shape, given
    )
    return stored


@pytest.mark.parametrize("name", GGUF)
def test_random_bytes_decode_as_in_llama_cpp_and_are_packed_again(name: str) -> None:
    codec = FORMS[name].codec
    generator = torch.Generator().manual_seed(0)
    row = FORMS[name].codec.shapes(torch.Size((2048, COLUMNS)))[0]
    stored = torch.randint(0, 256, row, dtype=torch.uint8, generator=generator)
    expected, made = decoded_by_ggml(name, stored), torch.empty(2048, COLUMNS)
    packed.decode(name, stored, stored[:, :0], made)
    finite = expected.isfinite()  # but for scales that are not, one in 32
    assert finite.float().mean() > 0.9
    assert torch.equal(made[finite].view(torch.int32), expected[finite].view(torch.int32))
    assert codec.unpack
    assert torch.equal(codec.pack(*codec.unpack(stored, stored[:, :0]))[0], stored)
    rounded = torch.empty(2048, COLUMNS, dtype=torch.bfloat16)
    packed.decode(name, stored, stored[:, :0], rounded)
    assert torch.equal(rounded[finite], expected[finite].bfloat16())


@pytest.mark.parametrize("important", [False, True])
@pytest.mark.parametrize("name", GGUF)
def test_errors_of_a_search_are_those_of_llama_cpp(name: str, important: bool) -> None:
    """Root mean squares, relative to the weight's, plain and weighted with the importance of columns."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(128, COLUMNS, generator=generator) * torch.rand(128, 1, generator=generator).exp()
    columns = torch.rand(COLUMNS, generator=generator) ** 4 + 0.01
    importance = columns if important else None
    theirs = decoded_by_ggml(name, quantized_by_ggml(name, weight, importance))
    mine = decoded_by_ggml(name, encoded(FORMS[name].codec, weight, importance)[0])
    for squares in (torch.ones(COLUMNS), columns):
        errors = [((made - weight).square() * squares).sum().sqrt() for made in (mine, theirs)]
        assert errors[0] < 1.01 * errors[1]


@pytest.mark.parametrize("name", [*GGUF, *OTHERS])
def test_weights_that_a_search_cannot_scale_are_packed(name: str) -> None:
    """Zeros, equal values, and one value beside zeros, in experts of which each has its rows."""
    weight = torch.zeros(2, 3, COLUMNS)
    weight[0, 1], weight[1, 0], weight[1, 2, 7] = -0.5, 3.0, 1.0
    codec = FORMS[name].codec
    for importance in (None, torch.ones(COLUMNS)):
        stored, scales = encoded(codec, weight, importance)
        made = torch.empty_like(weight)
        packed.decode(name, stored, scales, made)
        assert (made - weight).abs().max() < 0.04 * weight.abs().max()
        assert torch.equal(made[0, 0], weight[0, 0])


@pytest.mark.parametrize("name", OTHERS)
def test_the_formats_of_vllm_have_the_values_that_their_bytes_are_read_as(name: str) -> None:
    weight = torch.randn(2, 256, COLUMNS, generator=torch.Generator().manual_seed(3)) / 50
    codec = FORMS[name].codec
    fields = codec.search(weight, None)
    grid = codec.grid(fields)
    codes = codec.nearest(weight, grid)
    stored, scales = codec.pack(codes, fields)
    how = packed.Packing(name, scales, weight.shape, torch.float32)
    made = packed.packed(stored, how)
    assert torch.equal(packed.values(made), codec.values(codes, grid))
    assert torch.equal(packed.pack(name, weight), made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4_is_read_as_compressed_tensors_does(dtype: torch.dtype) -> None:
    """compressed-tensors 0.20: `unpack_from_int32` (lowest bits first, less 8), `_dequantize` in the scale's type."""
    generator = torch.Generator().manual_seed(4)
    integers = torch.randint(-(2**31), 2**31 - 1, (8, COLUMNS // 8), dtype=torch.int32, generator=generator)
    scale = torch.rand(8, COLUMNS // 128, generator=generator).to(dtype) / 30
    codes = torch.stack([(integers >> 4 * place & 15) - 8 for place in range(8)], dim=-1).flatten(1)
    expected = codes.to(dtype) * scale.repeat_interleave(128, 1)
    found = packed.from_published("int4", integers, scale.float(), expected.shape, dtype)
    assert torch.equal(packed.values(found), expected)


def test_int4_has_smaller_errors_than_with_the_scales_of_compressed_tensors() -> None:
    """A largest value of 7.5 steps (`calculate_qparams`)."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(5))
    scales = weight.view(64, -1, 128).abs().amax(-1, keepdim=True) / 7.5
    theirs = ((weight.view(64, -1, 128) / scales).round().clamp(-8, 7) * scales).view_as(weight) - weight
    parameter = packed.pack("int4", weight)
    assert (packed.values(parameter) - weight).norm() < 0.97 * theirs.norm()
    how = packed.packing_of(parameter)
    assert how is not None
    assert torch.equal(how.scales, how.scales.bfloat16().float())
    assert (how.scales > 0).all()


@pytest.mark.parametrize("name", [*GGUF, *OTHERS])
def test_packed_parameters_have_experts_and_shapes_without_values(name: str) -> None:
    weight = torch.randn(2, 4, COLUMNS, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16)
    parameter = packed.pack(name, weight)
    alone = packed.pack(name, weight[1])
    assert torch.equal(parameter[1], alone)
    assert torch.equal(packed.values(parameter)[1], packed.values(alone))
    assert packed.pack(name, weight.to("meta")).shape == parameter.shape
