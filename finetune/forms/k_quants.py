"""Q4_K, Q5_K, Q6_K and IQ4_XS: blocks of 256 weights with a scale in float16, and smaller ones of groups in them.

Layouts: ggml/src/ggml-common.h of llama.cpp; searches and decoding: ggml/src/ggml-quants.c, whose function each names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from finetune.forms import scale_search
from finetune.forms.block_fields import apart, as_bytes, as_half, from_halves, in_halves, joined, split, together
from finetune.forms.codec import BlockFields, Blocks, BytesAndScales, Codec, Grid, InGguf, Tile, of_gguf

COLUMNS = 256


def _in_groups(weight: torch.Tensor, importance: torch.Tensor | None, group: int) -> tuple[torch.Tensor, ...]:
    """Weight and importance, if any, as (..., rows, blocks, groups, columns of a group)."""
    each = weight, None if importance is None else importance.expand_as(weight)
    first, second = (one if one is None else one.unflatten(-1, (-1, COLUMNS // group, group)) for one in each)
    assert first is not None
    return (first,) if second is None else (first, second)


def important(importance: torch.Tensor, groups: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """The weight of each square of an error (`quantize_row_q4_K_impl`): `squares` are those of weights around it."""
    return importance * (squares + groups.square()).sqrt_()


def multiples(numbers: torch.Tensor, unit: torch.Tensor, lowest: int, highest: int) -> torch.Tensor:
    """The numbers (..., groups) as multiples of a unit (...), rounded and clamped."""
    return (numbers / unit.float().unsqueeze(-1)).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(lowest, highest)


# -- Q4_K and Q5_K -----------------------------------------------------------------------------------------------------

_SMALL = 63
"""The largest scale, and offset, of a group in 6 bits."""


def search_with_offsets(
    highest: int, extras: Sequence[float], weight: torch.Tensor, importance: torch.Tensor | None
) -> BlockFields:
    """Fields of Q4_K or Q5_K (`quantize_row_q4_K_ref`, `quantize_row_q4_K_impl`): `extras` without importance."""
    groups, *given = _in_groups(weight, importance, 32)
    if given:
        weights = important(given[0], groups, 2 * groups.square().mean((-1, -2), keepdim=True))
        best = scale_search.scales_and_offsets(groups, weights, highest, [0.05 * step - 0.9 for step in range(37)])
        units = [scale_search.units(one, weights.sum(-1), _SMALL) for one in best]
    else:
        weights = groups.abs() + groups.square().mean(-1, keepdim=True).sqrt_()
        best = scale_search.scales_and_offsets(groups, weights, highest, extras)
        units = [one.amax(-1) / _SMALL for one in best]
    d, dmin = (unit.half() for unit in units)
    scales, mins = (multiples(*pair, 0, _SMALL).to(torch.uint8) for pair in zip(best, (d, dmin), strict=True))
    return {"d": d, "dmin": dmin, "scales": scales, "mins": mins}


search_q4_k = functools.partial(search_with_offsets, 15, [0.1 * step - 1 for step in range(21)])
search_q5_k = functools.partial(search_with_offsets, 31, [0.1 * step - 0.5 for step in range(16)])


def grid_with_offsets(fields: BlockFields) -> Grid:
    scales = fields["d"].float().unsqueeze(-1) * fields["scales"]
    return Grid(scales.flatten(-2), (fields["dmin"].float().unsqueeze(-1) * fields["mins"]).flatten(-2))


def _pack_small(fields: BlockFields) -> torch.Tensor:
    """The bytes of the numbers that a block has beside codes: 4, and 12 with eight scales and offsets in 6 bits each.

    The four lower bits of the last four of both share bytes, and their two higher bits are those of the first four.
    """
    scales, mins = fields["scales"], fields["mins"]
    first = [one[..., :4] | (one[..., 4:] >> 4 << 6) for one in (scales, mins)]
    last = (scales[..., 4:] & 15) | (mins[..., 4:] << 4)
    return torch.cat((as_bytes(fields["d"]), as_bytes(fields["dmin"]), *first, last), dim=-1)


def _unpack_small(stored: torch.Tensor) -> BlockFields:
    d, dmin, scales, mins, last = stored.split((2, 2, 4, 4, 4), dim=-1)
    return {
        "d": as_half(d), "dmin": as_half(dmin),
        "scales": torch.cat((scales & 63, (last & 15) | (scales >> 6 << 4)), dim=-1),
        "mins": torch.cat((mins & 63, (last >> 4) | (mins >> 6 << 4)), dim=-1),
    }  # fmt: skip


def _low_bits(codes: torch.Tensor) -> torch.Tensor:
    return in_halves(codes, 64).unflatten(-2, (-1, COLUMNS // 64)).flatten(-2)


def _from_low_bits(stored: torch.Tensor) -> torch.Tensor:
    """(..., blocks, groups of 32, 32)."""
    return from_halves(stored.unflatten(-1, (-1, 32))).flatten(-2).unflatten(-1, (-1, 32))


def pack_q4_k(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return joined(_pack_small(fields), _low_bits(codes))


def unpack_q4_k(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    small, low = split(stored, 16, 128)
    return _from_low_bits(low).flatten(-3), _unpack_small(small)


def pack_q5_k(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    """The fifth bits of the eight groups share 32 bytes."""
    high = together(codes.unflatten(-1, (-1, 8, 32)) >> 4, bits=1)
    return joined(_pack_small(fields), high, _low_bits(codes))


def unpack_q5_k(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    small, high, low = split(stored, 16, 32, 128)
    return (_from_low_bits(low) | apart(high, bits=1) << 4).flatten(-3), _unpack_small(small)


# -- Q6_K --------------------------------------------------------------------------------------------------------------


def nearest_of(lowest: int, highest: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda wanted: wanted.round_().clamp_(lowest, highest)


def around(highest: float) -> list[float]:
    """What `make_qx_quants` makes the value of largest size: `highest`, and 9 tenths more or less."""
    return [-highest, *(-highest - 0.1 * step for step in range(-9, 10) if step)]


def search_q6_k(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """`quantize_row_q6_K_ref`, `quantize_row_q6_K_impl`."""
    groups, *given = _in_groups(weight, importance, 16)
    weights = given[0] if given else groups.square()
    best = scale_search.scales(groups, weights, around(32), nearest_of(-32, 31))
    d = (of_largest_size(best) / -128).half()
    return {"d": d, "scales": multiples(best, d, -128, 127).to(torch.int8)}


def of_largest_size(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True)).squeeze(-1)


def grid_of_products(fields: BlockFields) -> Grid:
    return Grid((fields["d"].float().unsqueeze(-1) * fields["scales"]).flatten(-2))


def pack_q6_k(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    """Of each 128 columns, four runs of 32: the first shares bytes of lower bits with the third, the second with the
    fourth, and all four share those of higher bits.
    """
    halves = codes.unflatten(-1, (-1, 2, 4, 32))
    low = in_halves(codes, 128).unflatten(-2, (-1, 2)).flatten(-2)
    return joined(
        low, together(halves >> 4, bits=2).flatten(-2), fields["scales"].view(torch.uint8), as_bytes(fields["d"])
    )


def unpack_q6_k(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    low, high, each, d = split(stored, 128, 64, 16, 2)
    lower = from_halves(low.unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    codes = lower | apart(high.unflatten(-1, (2, 32)), bits=2) << 4
    return codes.flatten(-4), {"d": as_half(d), "scales": each.contiguous().view(torch.int8)}


# -- IQ4_XS ------------------------------------------------------------------------------------------------------------

IQ4_LEVELS = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)  # fmt: skip
"""`kvalues_iq4nl`."""


def iq4_scales(groups: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`quantize_row_iq4_nl_impl`: the value of largest size becomes 127, or the lowest level and up to 7 around it."""
    levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=groups.device)
    between = (levels[1:] + levels[:-1]) / 2

    def nearest(wanted: torch.Tensor) -> torch.Tensor:
        codes = torch.bucketize(wanted, between, out_int32=True)
        return levels.index_select(0, codes.flatten()).view(codes.shape)

    return scale_search.scales(groups, weights, [127, *range(-134, -119)], nearest)


def search_iq4_xs(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    groups, *given = _in_groups(weight, importance, 32)
    squares = groups.square()
    weights = important(given[0], groups, 2 * squares.mean((-1, -2), keepdim=True)) if given else squares
    found = iq4_scales(groups, weights)
    d = (of_largest_size(found) / -32).half()
    return {"d": d, "scales": multiples(found, d, -32, 31).to(torch.int8)}


def pack_iq4_xs(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    """Scales are stored plus 32: their two higher bits, then their four lower ones in pairs."""
    scales = (fields["scales"] + 32).view(torch.uint8)
    high = together((scales >> 4).unflatten(-1, (2, 4)).mT, bits=2)
    low = scales[..., ::2] & 15 | (scales[..., 1::2] << 4)
    return joined(as_bytes(fields["d"]), high, low, in_halves(codes, 32).unflatten(-2, (-1, 8)).flatten(-2))


def unpack_iq4_xs(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    d, high, low, codes = split(stored, 2, 2, 4, 128)
    lower = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    each = lower | apart(high, bits=2).mT.flatten(-2) << 4
    return from_halves(codes.unflatten(-1, (8, 16))).flatten(-3), {
        "d": as_half(d),
        "scales": each.view(torch.int8) - 32,
    }


def _codec(
    name: str, group: int, levels: tuple[float, ...], stored: int, fallback: str, tile: Tile, *functions: Any
) -> Codec:
    """`functions`: those that search, make a grid, pack and unpack."""
    search, grid, pack, unpack = functions
    return Codec(
        Blocks(COLUMNS, group, stored, tile=tile), levels, search, grid, pack, unpack,
        files=of_gguf(name), gguf=InGguf(fallback=fallback),
    )  # fmt: skip


CODECS = {
    "q4_k": _codec(
        "q4_k", 32, tuple(range(16)), 144, "q5_0", Tile(4, 32, stride=64, apart=32),
        search_q4_k, grid_with_offsets, pack_q4_k, unpack_q4_k,
    ),
    "q5_k": _codec(
        "q5_k", 32, tuple(range(32)), 176, "q5_1", Tile(4, 32, stride=64, apart=32),
        search_q5_k, grid_with_offsets, pack_q5_k, unpack_q5_k,
    ),
    "q6_k": _codec(
        "q6_k", 16, tuple(range(-32, 32)), 210, "q8_0", Tile(8, 16, stride=16, apart=64, half=4),
        search_q6_k, grid_of_products, pack_q6_k, unpack_q6_k,
    ),
    "iq4_xs": _codec(
        "iq4_xs", 32, IQ4_LEVELS, 136, "iq4_nl", Tile(8, 16, stride=32, apart=16),
        search_iq4_xs, grid_of_products, pack_iq4_xs, unpack_iq4_xs,
    ),
}  # fmt: skip
