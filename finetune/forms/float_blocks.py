"""MXFP4, NVFP4 and FP8 in the layouts of vLLM and transformers, MXFP4 in that of GGUF too, and INT4.

Codes are the bits of e2m1 (four) and e4m3 (eight), rounded to nearest, ties to even. Sources: OCP Microscaling Formats
v1.0; "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149) and compressed-tensors (0.20); DeepSeek-V3
(arXiv 2412.19437, section 3.3.2); of GGUF's layout, ggml/src/ggml-quants.c of llama.cpp; of INT4, the format
`pack-quantized` of compressed-tensors (`compressors/pack_quantized/base.py`).
"""

from __future__ import annotations

import torch

from finetune.forms import scale_search
from finetune.forms.block_fields import (
    BlockFields,
    BytesAndScales,
    Grid,
    from_halves,
    in_halves,
    joined,
    split,
)

# -- numbers -----------------------------------------------------------------------------------------------------------

_SIZES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
TWICE_E2M1 = (*_SIZES, *(-size for size in _SIZES))
"""Twice the values of e2m1, by code: with half the scale, since the largest of MXFP4, 2^128, is infinite in float32."""
GGUF_E2M1 = tuple(level + 0.0 for level in TWICE_E2M1)
"""`kvalues_mxfp4`: integers, which have one zero."""
_LARGEST_E2M1 = 6.0
_PAIRS = [TWICE_E2M1[code] for byte in range(256) for code in (byte & 15, byte >> 4)]

_E4M3 = torch.finfo(torch.float8_e4m3fn)
_SMALLEST_E4M3 = _E4M3.smallest_normal / 8
E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist())


def nearest_e2m1(twice: torch.Tensor) -> torch.Tensor:
    """The codes of halves of numbers; what is no number, of a scale of 0, is 0."""
    size = twice.nan_to_num_(0.0).abs()
    code = torch.where(size < 4, size.round(), torch.where(size < 8, (size / 2).round() + 2, (size / 4).round() + 4))
    return code.clamp_(max=7).to(torch.uint8) + twice.signbit().to(torch.uint8) * 8


def nearest_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp_(-_E4M3.max, _E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) in float32 for e from -1 to 255 (infinite), built from its bits; those up to 0 are subnormal."""
    exponents = exponents.int()
    return torch.maximum(exponents << 23, 1 << 21 << (exponents + 1).clamp_(0, 1)).view(torch.float32)


def in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the lower four bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def from_pairs(stored: torch.Tensor) -> torch.Tensor:
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


def _decode_pairs(stored: torch.Tensor, half_scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of codes in pairs into `out`; they are made in the type of the scales (..., rows, blocks)."""
    dtype = half_scales.dtype
    pairs = torch.tensor(_PAIRS, dtype=dtype, device=stored.device)
    pairs = pairs.view({2: torch.int32, 4: torch.int64}[dtype.itemsize])
    values = pairs.index_select(0, stored.flatten().int()).view(dtype).view(*half_scales.shape, -1)
    values *= half_scales.unsqueeze(-1)
    out.copy_(values.flatten(-2)[..., : out.shape[-1]])


def _largest(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.unflatten(-1, (-1, group)).abs().amax(-1)


# -- MXFP4 -------------------------------------------------------------------------------------------------------------


def search_mxfp4(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """Section 6.3: a block's scale is the power of two of its largest value over that of e2m1, 4; and 127 is added."""
    exponents = torch.frexp(_largest(weight, 32)).exponent - 3  # frexp's mantissa is below 1
    return {"exponents": (exponents.clamp_(-127, 127) + 127).to(torch.uint8)}


def grid_of_exponents(fields: BlockFields) -> Grid:
    return Grid(power_of_two(fields["exponents"].int() - 1))


def pack_mxfp4(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return in_pairs(codes), fields["exponents"]


def decode_mxfp4(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    dtype = torch.float32 if out.dtype is torch.float16 else out.dtype  # scales overflow in float16
    _decode_pairs(stored, grid_of_exponents({"exponents": scales}).scales.to(dtype), out)


def pack_gguf_mxfp4(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return joined(fields["exponents"].unsqueeze(-1), in_halves(codes, 32))


def unpack_gguf_mxfp4(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    exponents, low = split(stored, 1, 16)
    return from_halves(low).flatten(-2), {"exponents": exponents.squeeze(-1)}


# -- NVFP4 -------------------------------------------------------------------------------------------------------------

FACTOR_BYTES = 8
"""Bytes of two factors in float32, with which the scales of a row begin: one multiplies them, one divides them.

A weight has one such factor. ModelOpt publishes that which multiplies, compressed-tensors that which divides; the
other is 1. As rows have their own, weights can be joined, such as those of experts.
"""


def factors(scales: torch.Tensor) -> torch.Tensor:
    """The factors (..., rows, 2) of the scales of a packed weight."""
    return scales[..., :FACTOR_BYTES].contiguous().view(torch.float32)


def search_nvfp4(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    both = nvfp4_factors(weight.abs().amax((-2, -1))).unsqueeze(-2)
    return nvfp4_fields(weight, both.repeat_interleave(weight.shape[-2], -2))


def nvfp4_factors(largest: torch.Tensor) -> torch.Tensor:
    """The factors (..., 2) of weights, or experts, with these largest values (...), which become 6 times 448."""
    divisor = (_E4M3.max * _LARGEST_E2M1 / largest).nan_to_num_(nan=1.0, posinf=1.0)
    return torch.stack((torch.ones_like(divisor), divisor), dim=-1)


def nvfp4_fields(weight: torch.Tensor, factors: torch.Tensor) -> BlockFields:
    """The fields for factors (..., rows, 2): a block's largest value becomes 6, and 0 would be no scale."""
    each = (factors[..., 1:] * (_largest(weight, 16) / _LARGEST_E2M1)).clamp_(_SMALLEST_E4M3, _E4M3.max)
    return {"factors": factors, "scales": each.to(torch.float8_e4m3fn)}


def grid_nvfp4(fields: BlockFields) -> Grid:
    """`factors` (..., rows, 2): one multiplies the scales, and one divides them."""
    return Grid(fields["scales"].float() * fields["factors"][..., :1] / fields["factors"][..., 1:] * 0.5)


def pack_nvfp4(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    scales = torch.cat([fields[name].contiguous().view(torch.uint8) for name in ("factors", "scales")], dim=-1)
    return in_pairs(codes), scales


def decode_nvfp4(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    each = scales[..., FACTOR_BYTES:].contiguous().view(torch.float8_e4m3fn)
    _decode_pairs(stored, grid_nvfp4({"factors": factors(scales), "scales": each}).scales, out)


# -- FP8 ---------------------------------------------------------------------------------------------------------------

FP8_ROWS = 128
"""Rows with one scale; the fields have it for each row."""


def search_fp8(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """The largest value of 128 x 128 becomes the largest of e4m3, 448."""
    rows = [part.amax(-2, keepdim=True).expand_as(part) for part in _largest(weight, 128).split(FP8_ROWS, -2)]
    largest = torch.cat(rows, dim=-2)
    return {"scales": torch.where(largest > 0, largest / _E4M3.max, 1.0)}


def grid_of_scales(fields: BlockFields) -> Grid:
    return Grid(fields["scales"])


def pack_fp8(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return codes, fields["scales"][..., ::FP8_ROWS, :]


def decode_fp8(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    values = stored.view(torch.float8_e4m3fn).float()
    of_rows = scales.repeat_interleave(128, dim=-1)[..., : stored.shape[-1]]
    values *= of_rows.repeat_interleave(FP8_ROWS, dim=-2)[..., : stored.shape[-2], :]
    out.copy_(values)


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
    return in_pairs(codes), fields["scales"]


def unpack_int4(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    return from_pairs(stored), {"scales": scales}
