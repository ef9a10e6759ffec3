"""Triton kernels that decode packed weights: the forms of `finetune.forms` that have a tile, equal to the bit.

A program decodes some blocks as a tile (blocks, parts, run). Bytes of a run lie side by side; of those that hold two
codes, the lower four bits belong to one run of columns and the upper ones to another, or both to neighbouring columns.
Products are exact or rounded before sums, as in C.

Importing this module needs Triton.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from finetune.forms import FORMS, packed

# -- numbers -----------------------------------------------------------------------------------------------------------


@triton.jit
def _byte(address):
    return tl.load(address).to(tl.int32)


@triton.jit
def _half(address):
    """A number in float16 at any address of bytes."""
    bits = _byte(address) | (_byte(address + 1) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _single(address):
    """A number in float32 at any address of bytes."""
    low = _byte(address) | (_byte(address + 1) << 8)
    return (low | (_byte(address + 2) << 16) | (_byte(address + 3) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _signed(byte):
    return (byte ^ 128) - 128


@triton.jit
def _power_of_two(exponent):
    """2^(e - 127) for e from -1 to 255, as `forms.e2m1.power_of_two`."""
    normal = tl.maximum(exponent, 0) << 23
    subnormal = tl.where(exponent < 0, 1 << 21, 1 << 22)
    return tl.maximum(normal, subnormal).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code, ZEROS: tl.constexpr):
    """Twice the value of four bits; `ZEROS` have signs, or not, as of C's integers."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    twice = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    if ZEROS:
        value = twice.to(tl.float32) * tl.where(code < 8, 1.0, -1.0)
    else:
        value = tl.where(code < 8, twice, -twice).to(tl.float32)
    return value


@triton.jit
def _e2m1_pair(byte, half_scale, ZEROS: tl.constexpr):
    return _e2m1(byte & 15, ZEROS) * half_scale, _e2m1(byte >> 4, ZEROS) * half_scale


@triton.jit
def _e4m3(bits):
    size = bits & 127
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, tl.where(size == 127, float("nan"), normal))
    return value * tl.where(bits < 128, 1.0, -1.0)


# -- formats -----------------------------------------------------------------------------------------------------------


@triton.jit
def _small_scale_and_offset(address, group):
    """The scale and the offset of a group of Q4_K or Q5_K in 6 bits each, from 12 bytes (`k_quants`)."""
    place = group & 3
    scale, offset, last = _byte(address + place), _byte(address + 4 + place), _byte(address + 8 + place)
    first = group < 4
    high_scale, high_offset = (last & 15) | ((scale >> 6) << 4), (last >> 4) | ((offset >> 6) << 4)
    scale, offset = tl.where(first, scale & 63, high_scale), tl.where(first, offset & 63, high_offset)
    return scale.to(tl.float32), offset.to(tl.float32)


@triton.jit
def _k_quant_with_offsets(block, part, at, FIVE: tl.constexpr):
    """Q4_K and Q5_K: values of the lower and the upper bits (blocks, 4, 32)."""
    d, smallest = _half(block), _half(block + 2)
    scale, offset = _small_scale_and_offset(block + 4, 2 * part)
    other_scale, other_offset = _small_scale_and_offset(block + 4, 2 * part + 1)
    byte = _byte(block + (48 if FIVE else 16) + part * 32 + at)
    low, high = byte & 15, byte >> 4
    if FIVE:
        fifth = _byte(block + 16 + at) >> (2 * part)
        low, high = low | ((fifth & 1) << 4), high | ((fifth & 2) << 3)
    low_value = low.to(tl.float32) * (d * scale) - smallest * offset
    return low_value, high.to(tl.float32) * (d * other_scale) - smallest * other_offset


@triton.jit
def _q6_k(block, part, at):
    """Values of the lower and the upper bits (blocks, 8, 16): four runs of 16 in each half of a block."""
    half, run = part // 4, part % 4
    byte = _byte(block + part * 16 + at)
    above = _byte(block + 128 + half * 32 + run % 2 * 16 + at) >> (run // 2 * 2)
    low, high = (byte & 15) | ((above & 3) << 4), (byte >> 4) | (above & 48)
    d, scales = _half(block + 208), block + 192 + half * 8 + run
    low_scale, high_scale = _signed(_byte(scales)).to(tl.float32), _signed(_byte(scales + 4)).to(tl.float32)
    return (low - 32).to(tl.float32) * (d * low_scale), (high - 32).to(tl.float32) * (d * high_scale)


@triton.jit
def _iq4_xs(block, part, at, table):
    """Values of the lower and the upper bits (blocks, 8, 16)."""
    low = (_byte(block + 4 + part // 2) >> (part % 2 * 4)) & 15
    high = (_byte(block + 2 + part // 4) >> (part % 4 * 2)) & 3
    scale = _half(block) * ((low | (high << 4)) - 32).to(tl.float32)
    byte = _byte(block + 8 + part * 16 + at)
    return tl.load(table + (byte & 15)) * scale, tl.load(table + (byte >> 4)) * scale


@triton.jit
def _small_block(block, at, table, FORM: tl.constexpr):
    """Q4_0, Q5_0, Q5_1 and IQ4_NL: values of the lower and the upper bits (blocks, 1, 16)."""
    FIVE: tl.constexpr = FORM == "q5_0" or FORM == "q5_1"
    OFFSET: tl.constexpr = FORM == "q5_1"
    d = _half(block)
    start = block + (4 if OFFSET else 2)
    byte = _byte(start + (4 if FIVE else 0) + at)
    low, high = byte & 15, byte >> 4
    if FIVE:
        low |= ((_byte(start + at // 8) >> (at % 8)) & 1) << 4
        high |= ((_byte(start + 2 + at // 8) >> (at % 8)) & 1) << 4
    MIDDLE: tl.constexpr = 0 if OFFSET else 16 if FIVE else 8
    if FORM == "iq4_nl":
        low_value, high_value = tl.load(table + low) * d, tl.load(table + high) * d
    else:
        low_value, high_value = (low - MIDDLE).to(tl.float32) * d, (high - MIDDLE).to(tl.float32) * d
    if OFFSET:
        m = _half(block + 2)
        low_value, high_value = low_value + m, high_value + m
    return low_value, high_value


@triton.jit
def _codes_apart(block, part, at, table, FORM: tl.constexpr):
    """GGUF's formats of up to 6 bits: values of the lower and of the upper bits."""
    if FORM == "q4_k" or FORM == "q5_k":
        low, high = _k_quant_with_offsets(block, part, at, FORM == "q5_k")
    elif FORM == "q6_k":
        low, high = _q6_k(block, part, at)
    elif FORM == "iq4_xs":
        low, high = _iq4_xs(block, part, at, table)
    elif FORM == "gguf_mxfp4":
        low, high = _e2m1_pair(_byte(block + 1 + at), _power_of_two(_byte(block) - 1), False)
    else:
        low, high = _small_block(block, at, table, FORM)
    return low, high


@triton.jit
def _codes_in_pairs(block, scales, place, at, SCALES: tl.constexpr):
    """Forms of 4 bits in neighbouring columns: values of the lower and of the upper bits (blocks, 1, run)."""
    byte = _byte(block + at)
    if SCALES == "exponents":
        low, high = _e2m1_pair(byte, _power_of_two(_byte(scales + place) - 1), True)
    elif SCALES == "factors":
        # The scales of a row are two factors in 8 bytes, then one byte for each block.
        scale = tl.div_rn(_e4m3(_byte(scales + 8 + place)) * _single(scales), _single(scales + 4))
        low, high = _e2m1_pair(byte, scale * 0.5, True)
    else:
        scale = tl.load(scales + place)
        low, high = ((byte & 15) - 8).to(tl.float32) * scale, ((byte >> 4) - 8).to(tl.float32) * scale
    return low, high


@triton.jit
def _decode(
    out, stored, scales, table, blocks, rows, in_row, width, out_matrix, out_row, out_column, stored_row, scale_row,
    FORM: tl.constexpr, ORDER: tl.constexpr, BYTES: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr,
    STRIDE: tl.constexpr, APART: tl.constexpr, HALF: tl.constexpr, SCALES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Blocks of `BYTES` bytes, each of `PARTS` x `RUN` bytes of codes, in matrices of `rows` rows.

    The other constants are those of `forms.codec.Tile`.
    """
    number = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None, None]
    part, at = tl.arange(0, PARTS)[None, :, None], tl.arange(0, RUN)[None, None, :]
    read = tl.minimum(number, blocks - 1)
    row, place = read // in_row, read % in_row
    block = stored + row.to(tl.int64) * stored_row + place * BYTES
    if ORDER == "apart":
        low, high = _codes_apart(block, part, at, table, FORM)
    elif ORDER == "pairs":
        scales += row.to(tl.int64) * scale_row
        low, high = _codes_in_pairs(block, scales, place, at, SCALES)
        low, at = tl.interleave(low, high), tl.arange(0, 2 * RUN)[None, None, :]
    elif FORM == "q8_0":
        low = _signed(_byte(block + 2 + at)).to(tl.float32) * _half(block)
    else:  # FP8, with a scale for 128 rows
        scales += (row // rows * ((rows + 127) // 128) + row % rows // 128).to(tl.int64) * scale_row
        low = _e4m3(tl.load(block + at, place * RUN + at < width, 0).to(tl.int32)) * tl.load(scales + place)

    first = part * STRIDE
    if HALF:
        first = part // HALF * 2 * APART + part % HALF * STRIDE
    SIZE: tl.constexpr = PARTS * RUN * (1 if ORDER == "single" else 2)
    column = place * SIZE + first + at
    out += (row // rows).to(tl.int64) * out_matrix + (row % rows).to(tl.int64) * out_row
    inside = number < blocks
    tl.store(out + column.to(tl.int64) * out_column, low.to(out.dtype.element_ty), inside & (column < width))
    if ORDER == "apart":
        column += APART
        tl.store(out + column.to(tl.int64) * out_column, high.to(out.dtype.element_ty), inside & (column < width))


# -- launches ----------------------------------------------------------------------------------------------------------

_VALUES = 2048
"""Values of a program, 16 a thread."""


def decode_packed_(out: Tensor, codes: Tensor, scales: Tensor, form: str) -> None:
    """Write the values of a form into `out` (..., rows, columns)."""
    codec = FORMS[form].codec
    if not (tile := codec.blocks.tile):
        packed.decode(form, codes, scales, out)
        return
    out = out.unsqueeze(0) if out.dim() == 2 else out.flatten(0, -3)
    matrices, rows, width = out.shape
    in_row = triton.cdiv(width, codec.blocks.columns)
    codes, scales = (tensor.contiguous().flatten(0, -2) for tensor in (codes, scales))
    blocks, each = matrices * rows * in_row, max(_VALUES // codec.blocks.columns, 1)
    table = _table(out.device) if form.startswith("iq4") else None
    _decode[triton.cdiv(blocks, each),](
        out, codes, scales, table, blocks, rows, in_row, width, *out.stride(), codes.stride(0), scales.stride(0),
        FORM=form, ORDER=tile.order, BYTES=codec.blocks.stored, PARTS=tile.parts, RUN=tile.run, STRIDE=tile.stride,
        APART=tile.apart, HALF=tile.half, SCALES=tile.scales, BLOCKS=each, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@cache
def _table(device: torch.device) -> Tensor:
    """The 16 levels of IQ4; they stay on the device."""
    return torch.tensor(FORMS["iq4_nl"].codec.levels, device=device)
