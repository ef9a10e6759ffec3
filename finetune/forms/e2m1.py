"""Floating-point numbers of four bits (e2m1), two codes a byte, and powers of two as scales.

Codes are rounded to nearest, ties to even (OCP Microscaling Formats v1.0).
"""

from __future__ import annotations

import torch

_SIZES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
TWICE = (*_SIZES, *(-size for size in _SIZES))
"""Twice the values of e2m1, by code: with half the scale, since the largest of MXFP4, 2^128, is infinite in float32."""
LARGEST = 6.0
_PAIRS = [TWICE[code] for byte in range(256) for code in (byte & 15, byte >> 4)]


def nearest(twice: torch.Tensor) -> torch.Tensor:
    """The codes of halves of numbers; what is no number, of a scale of 0, is 0."""
    size = twice.nan_to_num_(0.0).abs()
    code = torch.where(size < 4, size.round(), torch.where(size < 8, (size / 2).round() + 2, (size / 4).round() + 4))
    return code.clamp_(max=7).to(torch.uint8) + twice.signbit().to(torch.uint8) * 8


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) in float32 for e from -1 to 255 (infinite), built from its bits; those up to 0 are subnormal."""
    exponents = exponents.int()
    return torch.maximum(exponents << 23, 1 << 21 << (exponents + 1).clamp_(0, 1)).view(torch.float32)


def in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the lower four bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def from_pairs(stored: torch.Tensor) -> torch.Tensor:
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


def decode_pairs(stored: torch.Tensor, half_scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of codes in pairs into `out`; they are made in the type of the scales (..., rows, blocks)."""
    dtype = half_scales.dtype
    pairs = torch.tensor(_PAIRS, dtype=dtype, device=stored.device)
    pairs = pairs.view({2: torch.int32, 4: torch.int64}[dtype.itemsize])
    values = pairs.index_select(0, stored.flatten().int()).view(dtype).view(*half_scales.shape, -1)
    values *= half_scales.unsqueeze(-1)
    out.copy_(values.flatten(-2)[..., : out.shape[-1]])


def largest(weight: torch.Tensor, group: int) -> torch.Tensor:
    """The largest size of the values of each group of columns."""
    return weight.unflatten(-1, (-1, group)).abs().amax(-1)
