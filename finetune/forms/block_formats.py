"""Formats of blocks of weights, each with a scale: which values a weight may have, and how they are stored.

The values of a weight (..., rows, columns) are `scale * level - offset`: a code chooses one of the format's levels, and
a group of neighbouring columns shares scale and offset (`Grid`). What is stored are the fields of the format, such as
scales in 6 bits and the factor of all of them in float16 (`BlockFields`). Any codes and fields make a legal weight;
only decoding is fixed, and equal to the bit to llama.cpp's (ggml/src/ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from finetune.forms import float_blocks, k_quants, small_blocks
from finetune.forms.block_fields import BlockFields, BytesAndScales, Grid, is_linear


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks of `columns` weights of a row, of which `group` share a scale.

    `levels`: the value of each code, ascending unless the form has its own `nearest`, which gives codes in uint8 of
    numbers in units of the scale, and may overwrite them. `search`: the fields for weights (..., rows, columns) in
    float32, so that the squares of errors, weighted with the `importance` of each column (None: all alike), are small.
    `grid`: what fields decode to. `pack`: bytes, and scales (without columns where the bytes hold them), from codes in
    uint8 of the weight's shape; `unpack` is its reverse, in whose place a form may have its own `decode`. `block_bytes`
    are those of a block, `block_scales` the numbers beside them, and `row_scales` those with which a row's begin.
    """

    columns: int
    group: int
    levels: tuple[float, ...]
    search: Callable[[torch.Tensor, torch.Tensor | None], BlockFields]
    grid: Callable[[BlockFields], Grid]
    pack: Callable[[torch.Tensor, BlockFields], BytesAndScales]
    unpack: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, BlockFields]] | None
    block_bytes: int
    block_scales: int = 0
    nearest: Callable[[torch.Tensor], torch.Tensor] | None = None
    decode: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
    row_scales: int = 0


def nearest(form: BlockFormat, weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The codes (uint8, the weight's shape) of the levels that are nearest to `weight` (float32)."""
    wanted = weight.unflatten(-1, (-1, form.group))
    if grid.offsets is not None:
        wanted = wanted + grid.offsets.unsqueeze(-1)
    wanted = wanted / grid.scales.unsqueeze(-1)
    if form.nearest:
        return form.nearest(wanted).flatten(-2)
    wanted.nan_to_num_(0.0, 0.0, 0.0)  # a scale of 0 has one value
    if is_linear(form.levels):
        codes = wanted.round_().clamp_(form.levels[0], form.levels[-1]).sub_(form.levels[0])
    else:
        levels = torch.tensor(form.levels, dtype=torch.float32, device=weight.device)
        codes = torch.bucketize(wanted, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return codes.to(torch.uint8).flatten(-2)


def values(form: BlockFormat, codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The values in float32 of codes (..., rows, columns), rounded as llama.cpp rounds them."""
    if is_linear(form.levels):
        made = codes.float().add_(form.levels[0])
    else:
        levels = torch.tensor(form.levels, dtype=torch.float32, device=codes.device)
        made = levels.index_select(0, codes.flatten().int()).view(codes.shape)
    made = made.unflatten(-1, (-1, form.group)).mul_(grid.scales.unsqueeze(-1))
    if grid.offsets is not None:
        made -= grid.offsets.unsqueeze(-1)
    return made.flatten(-2)


def decode(form: BlockFormat, stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of bytes and scales into `out`."""
    if form.unpack:
        codes, fields = form.unpack(stored, scales)
        out.copy_(values(form, codes, form.grid(fields)))
    else:
        assert form.decode
        form.decode(stored, scales, out)


def encode(form: BlockFormat, weight: torch.Tensor, importance: torch.Tensor | None = None) -> BytesAndScales:
    """The bytes and scales of a weight, each value rounded to the nearest of those that `form.search` finds."""
    weight = weight.float()
    return encode_with(form, weight, form.search(weight, importance))


def encode_with(form: BlockFormat, weight: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    """The bytes and scales of a weight in float32, each value rounded to the nearest that `fields` allow."""
    return form.pack(nearest(form, weight, form.grid(fields)), fields)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "q4_0": BlockFormat(
        32, 32, tuple(range(-8, 8)), small_blocks.search_q4_0, small_blocks.one_scale,
        small_blocks.pack_4_bit, small_blocks.unpack_4_bit, 18,
    ),
    "q5_0": BlockFormat(
        32, 32, tuple(range(-16, 16)), small_blocks.search_q5_0, small_blocks.one_scale,
        small_blocks.pack_q5_0, small_blocks.unpack_q5_0, 22,
    ),
    "q5_1": BlockFormat(
        32, 32, tuple(range(32)), small_blocks.search_q5_1, small_blocks.one_scale_and_offset,
        small_blocks.pack_q5_1, small_blocks.unpack_q5_1, 24,
    ),
    "q8_0": BlockFormat(
        32, 32, tuple(range(-128, 128)), small_blocks.search_q8_0, small_blocks.one_scale,
        small_blocks.pack_q8_0, small_blocks.unpack_q8_0, 34,
    ),
    "iq4_nl": BlockFormat(
        32, 32, k_quants.IQ4_LEVELS, small_blocks.search_iq4_nl, small_blocks.one_scale,
        small_blocks.pack_4_bit, small_blocks.unpack_4_bit, 18,
    ),
    "q4_k": BlockFormat(
        256, 32, tuple(range(16)), k_quants.search_q4_k, k_quants.grid_with_offsets,
        k_quants.pack_q4_k, k_quants.unpack_q4_k, 144,
    ),
    "q5_k": BlockFormat(
        256, 32, tuple(range(32)), k_quants.search_q5_k, k_quants.grid_with_offsets,
        k_quants.pack_q5_k, k_quants.unpack_q5_k, 176,
    ),
    "q6_k": BlockFormat(
        256, 16, tuple(range(-32, 32)), k_quants.search_q6_k, k_quants.grid_of_products,
        k_quants.pack_q6_k, k_quants.unpack_q6_k, 210,
    ),
    "iq4_xs": BlockFormat(
        256, 32, k_quants.IQ4_LEVELS, k_quants.search_iq4_xs, k_quants.grid_of_products,
        k_quants.pack_iq4_xs, k_quants.unpack_iq4_xs, 136,
    ),
    "gguf_mxfp4": BlockFormat(
        32, 32, float_blocks.GGUF_E2M1, float_blocks.search_mxfp4, float_blocks.grid_of_exponents,
        float_blocks.pack_gguf_mxfp4, float_blocks.unpack_gguf_mxfp4, 17, nearest=float_blocks.nearest_e2m1,
    ),
    "mxfp4": BlockFormat(
        32, 32, float_blocks.TWICE_E2M1, float_blocks.search_mxfp4, float_blocks.grid_of_exponents,
        float_blocks.pack_mxfp4, None, 16, 1, float_blocks.nearest_e2m1, float_blocks.decode_mxfp4,
    ),
    "nvfp4": BlockFormat(
        16, 16, float_blocks.TWICE_E2M1, float_blocks.search_nvfp4, float_blocks.grid_nvfp4,
        float_blocks.pack_nvfp4, None, 8, 1, float_blocks.nearest_e2m1, float_blocks.decode_nvfp4,
        float_blocks.FACTOR_BYTES,
    ),
    "fp8": BlockFormat(
        128, 128, float_blocks.E4M3, float_blocks.search_fp8, float_blocks.grid_of_scales,
        float_blocks.pack_fp8, None, 128, 1, float_blocks.nearest_e4m3, float_blocks.decode_fp8,
    ),
    "int4": BlockFormat(
        128, 128, tuple(range(-8, 8)), float_blocks.search_int4, float_blocks.grid_of_scales,
        float_blocks.pack_int4, float_blocks.unpack_int4, 64, 1,
    ),
}  # fmt: skip
"""Formats by the name that `packed.FORMS` has for them too.

`gguf_mxfp4` is MXFP4 in the layout of a GGUF file.
"""
