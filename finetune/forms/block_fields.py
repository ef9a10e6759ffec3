"""The bytes of codes, and of the numbers that a block of weights stores beside them.

Shapes: bytes of blocks are (..., rows, blocks, bytes), numbers of blocks (..., rows, blocks), those of groups within
blocks (..., rows, blocks, groups), codes (..., rows, columns) in uint8.
"""

from __future__ import annotations

import torch

from finetune.forms.codec import BytesAndScales


def joined(*parts: torch.Tensor) -> BytesAndScales:
    """The bytes of blocks as rows of bytes, and no scales."""
    stored = torch.cat(parts, dim=-1).flatten(-2)
    return stored, stored[..., :0]


def split(stored: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    """The parts of each block, of `sizes` bytes."""
    return stored.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The bytes of one number a block."""
    return numbers.unsqueeze(-1).contiguous().view(torch.uint8)


def as_half(stored: torch.Tensor) -> torch.Tensor:
    """The numbers in float16 of two bytes a block."""
    return stored.contiguous().view(torch.float16).squeeze(-1)


def in_halves(codes: torch.Tensor, width: int) -> torch.Tensor:
    """The lower four bits of codes, (..., blocks, width / 2): the two halves of each `width` columns share bytes."""
    first, second = codes.unflatten(-1, (-1, 2, width // 2)).unbind(-2)
    return (first & 15) | (second << 4)


def from_halves(stored: torch.Tensor) -> torch.Tensor:
    """Codes of four bits, (..., blocks, width), from bytes (..., blocks, width / 2)."""
    return torch.cat((stored & 15, stored >> 4), dim=-1)


def together(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes (..., n) made of parts (..., 8 / bits, n) of `bits` bits each, the first in the lowest bits."""
    made = parts[..., 0, :].clone()
    for part in range(1, parts.shape[-2]):
        made |= parts[..., part, :] << (bits * part)
    return made


def apart(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """The parts (..., 8 / bits, n) of bytes (..., n); the reverse of `together`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=stored.device)
    return (stored.unsqueeze(-2) >> shifts.unsqueeze(-1)) & (2**bits - 1)
