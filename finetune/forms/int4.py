"""INT4: groups of 128 integers of four bits with a scale, as compressed-tensors writes them.

Source: the format `pack-quantized` of compressed-tensors (0.20, `compressors/pack_quantized/base.py`).
"""

from __future__ import annotations

import torch

from finetune.forms import e2m1, scale_search
from finetune.forms.codec import BlockFields, Blocks, BytesAndScales, Codec, Files, Grid, Layout, Tile
from finetune.forms.compressed_tensors import stated

_GROUP = 128


def _search(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """Scales that are numbers in bfloat16, as they are published: of those that make the largest value 7 to 10 steps,
    the one with the smallest error; compressed-tensors takes 7.5.
    """
    groups = weight.unflatten(-1, (-1, _GROUP))
    weights = torch.ones_like(groups) if importance is None else importance.expand_as(weight).view_as(groups)
    trials = [7.5, *(7 + 0.2 * step for step in range(16))]
    best = scale_search.scales(groups, weights, trials, lambda wanted: wanted.round_().clamp_(-8, 7), signed=False)
    return {"scales": best.bfloat16().float()}


def _pack(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    """Of the integers of 32 bits in files the bytes: eight codes each, the first in the lowest bits."""
    return e2m1.in_pairs(codes), fields["scales"]


def _unpack(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    return e2m1.from_pairs(stored), {"scales": scales}


def _write(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Eight codes in each integer of 32 bits, the first in the lowest; scales are numbers in bfloat16."""
    return codes.contiguous().view(torch.int32), scales.bfloat16(), torch.tensor(shape, dtype=torch.int64)


CODECS = {
    "int4": Codec(
        Blocks(
            _GROUP, _GROUP, _GROUP // 2, scales=1, scale_dtype=torch.float32, tile=Tile(1, _GROUP // 2, "pairs")
        ),
        tuple(range(-8, 8)), _search, lambda fields: Grid(fields["scales"]), _pack, _unpack,
        files=Files(
            written=Layout(
                ("_packed", "_scale", "_shape"), lambda scales, shape: scales.float(), _write,
                stated("pack-quantized", _GROUP, type="int", strategy="group"), zeros=True,
            )
        ),
    )
}  # fmt: skip
