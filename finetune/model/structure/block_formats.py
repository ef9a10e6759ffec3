"""Formats of blocks of weights, each with a scale: which values a weight may have, and how they are stored.

The values of a weight (..., rows, columns) are `scale * level - offset`: a code chooses one of the format's levels, and
a group of neighbouring columns shares scale and offset (`Grid`). What is stored are the fields of the format, such as
scales in 6 bits and the factor of all of them in float16 (`Fields`). Any codes and fields make a legal weight; only
decoding is fixed, and equal to the bit to llama.cpp's (ggml/src/ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Fields = Mapping[str, torch.Tensor]
"""What a format stores of each block beside the codes, by name, in the types in which it is stored."""


@dataclass(frozen=True)
class Grid:
    """The values that weights may have: `scales * level - offsets`, both in float32 (..., rows, columns / group)."""

    scales: torch.Tensor
    offsets: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks of `columns` weights of a row, of which `group` share a scale.

    `levels`: the value of each code, ascending. `search`: the fields for weights (..., rows, columns) in float32, so
    that the squares of errors, weighted with the `importance` of each column (None: all alike), are small. `grid`: what
    fields decode to. `pack`: bytes, and scales (without columns where the bytes hold them), from codes in uint8 of the
    weight's shape; `unpack` is its reverse.
    """

    columns: int
    group: int
    levels: tuple[float, ...]
    search: Callable[[torch.Tensor, torch.Tensor | None], Fields]
    grid: Callable[[Fields], Grid]
    pack: Callable[[torch.Tensor, Fields], tuple[torch.Tensor, torch.Tensor]]
    unpack: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Fields]]


def nearest(form: BlockFormat, weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The codes (uint8, the weight's shape) of the levels that are nearest to `weight` (float32)."""
    wanted = weight.unflatten(-1, (-1, form.group))
    if grid.offsets is not None:
        wanted = wanted + grid.offsets.unsqueeze(-1)
    wanted = (wanted / grid.scales.unsqueeze(-1)).nan_to_num_(0.0, 0.0, 0.0)  # a scale of 0 has one value
    levels = torch.tensor(form.levels, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(wanted, between).to(torch.uint8).flatten(-2)


def values(form: BlockFormat, codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The values in float32 of codes (..., rows, columns), rounded as llama.cpp rounds them."""
    levels = torch.tensor(form.levels, device=codes.device)
    made = levels[codes.int()].unflatten(-1, (-1, form.group)) * grid.scales.unsqueeze(-1)
    if grid.offsets is not None:
        made -= grid.offsets.unsqueeze(-1)
    return made.flatten(-2)


# -- Q4_0 and Q8_0 -----------------------------------------------------------------------------------------------------

_BLOCK = 32


def _one_scale(fields: Fields) -> Grid:
    return Grid(fields["d"].float())


def _search_q4_0(weight: torch.Tensor, importance: torch.Tensor | None) -> Fields:
    """The value of largest size becomes the lowest level, -8 (`quantize_row_q4_0_ref`)."""
    blocks = weight.unflatten(-1, (-1, _BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
    return {"d": (largest / -8).half()}


def _pack_q4_0(codes: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = codes.unflatten(-1, (-1, 2, _BLOCK // 2)).unbind(-2)
    return _joined(_bytes(fields["d"]), first | second << 4)


def _unpack_q4_0(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, Fields]:
    blocks = stored.unflatten(-1, (-1, 2 + _BLOCK // 2))
    packed = blocks[..., 2:]
    codes = torch.cat((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return codes, {"d": _half(blocks[..., :2])}


def _search_q8_0(weight: torch.Tensor, importance: torch.Tensor | None) -> Fields:
    """The value of largest size becomes the largest level, 127 (`quantize_row_q8_0_ref`)."""
    return {"d": (weight.unflatten(-1, (-1, _BLOCK)).abs().amax(-1) / 127).half()}


def _pack_q8_0(codes: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    signed = (codes.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
    return _joined(_bytes(fields["d"]), signed.unflatten(-1, (-1, _BLOCK)))


def _unpack_q8_0(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, Fields]:
    blocks = stored.unflatten(-1, (-1, 2 + _BLOCK))
    signed = blocks[..., 2:].contiguous().view(torch.int8)
    return (signed.to(torch.int16) + 128).to(torch.uint8).flatten(-2), {"d": _half(blocks[..., :2])}


def _joined(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of blocks (..., rows, blocks, bytes) as rows of bytes, and no scales."""
    stored = torch.cat(parts, dim=-1).flatten(-2)
    return stored, stored[..., :0]


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The bytes of one number a block: (..., blocks, bytes)."""
    return numbers.unsqueeze(-1).contiguous().view(torch.uint8)


def _half(stored: torch.Tensor) -> torch.Tensor:
    """The numbers in float16 of two bytes each: (..., blocks)."""
    return stored.contiguous().view(torch.float16).squeeze(-1)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "q4_0": BlockFormat(
        32, 32, tuple(range(-8, 8)), _search_q4_0, _one_scale, _pack_q4_0, _unpack_q4_0
    ),
    "q8_0": BlockFormat(
        32, 32, tuple(range(-128, 128)), _search_q8_0, _one_scale, _pack_q8_0, _unpack_q8_0
    ),
}  # fmt: skip
"""Formats by the name that `packed.FORMS` has for them too."""
