"""MXFP4, NVFP4 and FP8 in the layouts of vLLM and transformers, MXFP4 in that of GGUF too, and INT4.

Codes number the values of a format in ascending order, with one zero: of the bits that mean -0 nothing is left.
Sources: `packed`, which writes and reads the first three; of GGUF's, ggml/src/ggml-quants.c of llama.cpp; of INT4, the
format `pack-quantized` of compressed-tensors (0.20, `compressors/pack_quantized/base.py`).
"""

from __future__ import annotations

import torch

from finetune.model.structure import scale_search
from finetune.model.structure.block_fields import (
    BlockFields,
    BytesAndScales,
    Grid,
    from_halves,
    in_halves,
    joined,
    split,
)

# -- values ------------------------------------------------------------------------------------------------------------

E2M1_LEVELS = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_E2M1 = E2M1_LEVELS[-1]
TWICE_E2M1_LEVELS = tuple(2 * level for level in E2M1_LEVELS)
"""With half the scale, since the largest scale of MXFP4, 2^128, is infinite in float32."""

_E4M3 = torch.finfo(torch.float8_e4m3fn)
_SMALLEST_E4M3 = _E4M3.smallest_normal / 8
_POSITIVE = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
E4M3_LEVELS = (*(-level for level in reversed(_POSITIVE)), 0.0, *_POSITIVE)


def _signed(codes: torch.Tensor, sign: int) -> torch.Tensor:
    """Bits of sign and size from codes in ascending order; `sign` is the bit of the sign, below which sizes end."""
    middle = {8: 7, 128: 126}[sign]
    return torch.where(codes < middle, middle - codes + sign, codes - middle)


def _ascending(signed: torch.Tensor, sign: int) -> torch.Tensor:
    middle = {8: 7, 128: 126}[sign]
    return torch.where(signed < sign, signed + middle, middle + sign - signed)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) in float32 for e from -1 to 255 (infinite), built from its bits; those up to 0 are subnormal."""
    exponents = exponents.int()
    return torch.maximum(exponents << 23, 1 << 21 << (exponents + 1).clamp_(0, 1)).view(torch.float32)


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _from_pairs(stored: torch.Tensor) -> torch.Tensor:
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


# -- MXFP4 -------------------------------------------------------------------------------------------------------------


def mxfp4_exponents(blocks: torch.Tensor) -> torch.Tensor:
    """The scale's exponent and 127 (..., blocks) of blocks (..., blocks, 32): OCP MX v1.0, section 6.3."""
    exponent = torch.frexp(blocks.abs().amax(-1)).exponent - 3  # frexp's mantissa is below 1
    return exponent.clamp_(-127, 127) + 127


def search_mxfp4(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    return {"exponents": mxfp4_exponents(weight.unflatten(-1, (-1, 32))).to(torch.uint8)}


def grid_of_exponents(fields: BlockFields) -> Grid:
    return Grid(power_of_two(fields["exponents"].int() - 1))


def pack_mxfp4(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return _in_pairs(_signed(codes, 8)), fields["exponents"]


def unpack_mxfp4(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    return _ascending(_from_pairs(stored), 8), {"exponents": scales}


def pack_gguf_mxfp4(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return joined(fields["exponents"].unsqueeze(-1), in_halves(_signed(codes, 8), 32))


def unpack_gguf_mxfp4(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    exponents, low = split(stored, 1, 16)
    return _ascending(from_halves(low).flatten(-2), 8), {"exponents": exponents.squeeze(-1)}


# -- NVFP4 -------------------------------------------------------------------------------------------------------------


def _largest(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.unflatten(-1, (-1, group)).abs().amax(-1)


def search_nvfp4(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """The largest value of a weight, or of an expert's, becomes 6 times 448, that of a block 6."""
    largest = _largest(weight, 16)
    divisor = (_E4M3.max * _LARGEST_E2M1 / largest.amax((-2, -1), keepdim=True)).nan_to_num_(nan=1.0, posinf=1.0)
    divisor = divisor.repeat_interleave(weight.shape[-2], -2)  # (..., rows, 1)
    each = (divisor * (largest / _LARGEST_E2M1)).clamp_(_SMALLEST_E4M3, _E4M3.max)
    factors = torch.cat((torch.ones_like(divisor), divisor), dim=-1)
    return {"factors": factors, "scales": each.to(torch.float8_e4m3fn)}


def grid_nvfp4(fields: BlockFields) -> Grid:
    """`factors` (..., rows, 2): one multiplies the scales, and one divides them."""
    return Grid(fields["scales"].float() * fields["factors"][..., :1] / fields["factors"][..., 1:])


def pack_nvfp4(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    scales = torch.cat([fields[name].contiguous().view(torch.uint8) for name in ("factors", "scales")], dim=-1)
    return _in_pairs(_signed(codes, 8)), scales


def unpack_nvfp4(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    factors, each = scales[..., :8].contiguous(), scales[..., 8:].contiguous()
    fields = {"factors": factors.view(torch.float32), "scales": each.view(torch.float8_e4m3fn)}
    return _ascending(_from_pairs(stored), 8), fields


# -- FP8 ---------------------------------------------------------------------------------------------------------------

_ROWS = 128
"""Rows with one scale; the fields have it for each row."""


def search_fp8(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """The largest value of 128 x 128 becomes the largest of e4m3, 448."""
    rows = [part.amax(-2, keepdim=True).expand_as(part) for part in _largest(weight, 128).split(_ROWS, -2)]
    largest = torch.cat(rows, dim=-2)
    return {"scales": torch.where(largest > 0, largest / _E4M3.max, 1.0)}


def grid_of_scales(fields: BlockFields) -> Grid:
    return Grid(fields["scales"])


def pack_fp8(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return _signed(codes, 128), fields["scales"][..., ::_ROWS, :]


def unpack_fp8(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    each = scales.repeat_interleave(_ROWS, dim=-2)[..., : stored.shape[-2], :]
    return _ascending(stored, 128), {"scales": each}


# -- INT4 --------------------------------------------------------------------------------------------------------------

INT4_GROUP = 128


def search_int4(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """Scales that are numbers in bfloat16, as they are published: of those that make the largest value 7 to 10 steps,
    the one with the smallest error; compressed-tensors takes 7.5.
    """
    groups = weight.unflatten(-1, (-1, INT4_GROUP))
    weights = torch.ones_like(groups) if importance is None else importance.expand_as(weight).view_as(groups)
    trials = [7.5, *(7 + 0.2 * step for step in range(16))]
    best = scale_search.scales(groups, weights, trials, lambda wanted: wanted.round_().clamp_(-8, 7), signed=False)
    return {"scales": best.bfloat16().float()}


def pack_int4(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    """Of the integers of 32 bits in files the bytes: eight codes each, the first in the lowest bits."""
    return _in_pairs(codes), fields["scales"]


def unpack_int4(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    return _from_pairs(stored), {"scales": scales}
