"""Q4_0, Q5_0, Q5_1, Q8_0 and IQ4_NL: blocks of 32 weights with a scale in float16, Q5_1 with an offset too.

Layouts: ggml/src/ggml-common.h of llama.cpp; searches and decoding: ggml/src/ggml-quants.c, whose function each names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from finetune.forms import k_quants, scale_search
from finetune.forms.block_fields import apart, as_bytes, as_half, from_halves, in_halves, joined, split, together
from finetune.forms.codec import BlockFields, Blocks, BytesAndScales, Codec, Grid, Tile, of_gguf

COLUMNS = 32


def _important(weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """The weight of each square of an error, in blocks (`quantize_row_q4_0_impl`)."""
    made = k_quants.important(importance, weight, weight.square().mean(-1, keepdim=True))
    return made.unflatten(-1, (-1, COLUMNS))


def _search_around_zero(lowest: int, weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """The value of largest size becomes the lowest level (`quantize_row_q4_0_ref`), or about that."""
    blocks = weight.unflatten(-1, (-1, COLUMNS))
    if importance is None:
        return {"d": (k_quants.of_largest_size(blocks) / lowest).half()}
    nearest = k_quants.nearest_of(lowest, -lowest - 1)
    return {"d": scale_search.scales(blocks, _important(weight, importance), k_quants.around(-lowest), nearest).half()}


search_q4_0 = functools.partial(_search_around_zero, -8)
search_q5_0 = functools.partial(_search_around_zero, -16)


def search_q8_0(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """The value of largest size becomes the largest level, 127 (`quantize_row_q8_0_ref`)."""
    return {"d": (weight.unflatten(-1, (-1, COLUMNS)).abs().amax(-1) / 127).half()}


def search_iq4_nl(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    blocks = weight.unflatten(-1, (-1, COLUMNS))
    if importance is None:
        return {"d": k_quants.iq4_scales(blocks, blocks.square()).half()}
    squares = 2 * blocks.square().mean(-1, keepdim=True)
    weights = k_quants.important(importance.expand_as(weight).unflatten(-1, (-1, COLUMNS)), blocks, squares)
    return {"d": k_quants.iq4_scales(blocks, weights).half()}


def pack_4_bit(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return joined(as_bytes(fields["d"]), in_halves(codes, COLUMNS))


def unpack_4_bit(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    d, low = split(stored, 2, 16)
    return from_halves(low).flatten(-2), {"d": as_half(d)}


def pack_q5_0(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return joined(as_bytes(fields["d"]), _fifth_bits(codes), in_halves(codes, COLUMNS))


def unpack_q5_0(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    d, high, low = split(stored, 2, 4, 16)
    return _with_fifth_bits(low, high), {"d": as_half(d)}


def _fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """The fifth bits of the codes of a block in four bytes, one bit a column."""
    return together((codes >> 4).unflatten(-1, (-1, 4, 8)).mT, bits=1)


def _with_fifth_bits(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return (from_halves(low) | apart(high, bits=1).mT.flatten(-2) << 4).flatten(-2)


def pack_q8_0(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    """As signed integers, in two's complement: 128 less."""
    return joined(as_bytes(fields["d"]), (codes ^ 128).unflatten(-1, (-1, COLUMNS)))


def unpack_q8_0(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    d, signed = split(stored, 2, COLUMNS)
    return (signed ^ 128).flatten(-2), {"d": as_half(d)}


def search_q5_1(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """The range of values in equal steps (`quantize_row_q5_1_ref`), or about that (`quantize_row_q5_1_impl`)."""
    blocks = weight.unflatten(-1, (-1, COLUMNS))
    if importance is None:
        low, high = blocks.aminmax(dim=-1)
        return {"d": ((high - low) / 31).half(), "m": low.half()}
    extras = [0.05 * step - 0.9 for step in range(37)]
    scales, offsets = scale_search.scales_and_offsets(blocks, _important(weight, importance), 31, extras)
    return {"d": scales.half(), "m": -offsets.half()}


def pack_q5_1(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return joined(as_bytes(fields["d"]), as_bytes(fields["m"]), _fifth_bits(codes), in_halves(codes, COLUMNS))


def unpack_q5_1(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    d, m, high, low = split(stored, 2, 2, 4, 16)
    return _with_fifth_bits(low, high), {"d": as_half(d), "m": as_half(m)}


def _codec(name: str, levels: tuple[float, ...], stored: int, *functions: Any, tile: Tile | None = None) -> Codec:
    """`functions`: those that search, pack and unpack."""
    search, pack, unpack = functions

    def grid(fields: BlockFields) -> Grid:
        return Grid(fields["d"].float(), -fields["m"].float() if "m" in fields else None)

    return Codec(
        Blocks(COLUMNS, COLUMNS, stored, tile=tile or Tile(1, 16, apart=16)), levels, search, grid, pack, unpack,
        files=of_gguf(name),
    )  # fmt: skip


CODECS = {
    "q4_0": _codec("q4_0", tuple(range(-8, 8)), 18, search_q4_0, pack_4_bit, unpack_4_bit),
    "q5_0": _codec("q5_0", tuple(range(-16, 16)), 22, search_q5_0, pack_q5_0, unpack_q5_0),
    "q5_1": _codec("q5_1", tuple(range(32)), 24, search_q5_1, pack_q5_1, unpack_q5_1),
    "q8_0": _codec(
        "q8_0", tuple(range(-128, 128)), 34, search_q8_0, pack_q8_0, unpack_q8_0,
        tile=Tile(1, 32, "single"),
    ),
    "iq4_nl": _codec("iq4_nl", k_quants.IQ4_LEVELS, 18, search_iq4_nl, pack_4_bit, unpack_4_bit),
}  # fmt: skip
