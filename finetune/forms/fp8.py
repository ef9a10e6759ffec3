"""FP8: blocks of 128 x 128 floats of eight bits (e4m3) with a scale in float32, in the layout of DeepSeek-V3.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3.2). Decoding is equal to that of transformers (5.24,
`Fp8Dequantize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from finetune.forms import e2m1
from finetune.forms.codec import BlockFields, Blocks, BytesAndScales, Codec, Files, Floats, Grid, Layout, Tile

_SIZE = 128
"""Rows and columns with one scale; the fields have it for each row."""
_E4M3 = torch.finfo(torch.float8_e4m3fn)


def _nearest(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp_(-_E4M3.max, _E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)


def _search(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """The largest value of 128 x 128 becomes the largest of e4m3, 448."""
    parts = e2m1.largest(weight, _SIZE).split(_SIZE, -2)
    largest = torch.cat([part.amax(-2, keepdim=True).expand_as(part) for part in parts], dim=-2)
    return {"scales": torch.where(largest > 0, largest / _E4M3.max, 1.0)}


def _pack(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return codes, fields["scales"][..., ::_SIZE, :]


def _read(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    values = stored.view(torch.float8_e4m3fn).float()
    of_rows = scales.repeat_interleave(_SIZE, dim=-1)[..., : stored.shape[-1]]
    values *= of_rows.repeat_interleave(_SIZE, dim=-2)[..., : stored.shape[-2], :]
    out.copy_(values)


def _scales(scales: torch.Tensor) -> torch.Tensor:
    """Factors in float32 from those of files, which may be powers of two in e8m0."""
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    return e2m1.power_of_two(scales) if scales.dtype is torch.uint8 else scales.float()


def _states(given: Mapping[str, Any]) -> bool:
    """FP8 has other forms: one scale for each weight, experts in 4 bit (DeepSeek V4), quantized embeddings."""
    block = list(given.get("weight_block_size") or ())
    others = given.get("expert_dtype", "fp8") != "fp8" or given.get("modules_to_convert")
    return given.get("quant_method") == "fp8" and block == [_SIZE, _SIZE] and not others


_LAYOUT = Layout(
    ("", "_scale_inv"), _scales, lambda codes, scales, shape: (codes.view(torch.float8_e4m3fn), scales),
    lambda kept: {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_SIZE, _SIZE],
        "modules_to_not_convert": kept,
    },
)  # fmt: skip

CODECS = {
    "fp8": Codec(
        Blocks(
            _SIZE, _SIZE, _SIZE, scales=1, scale_dtype=torch.float32, rows=_SIZE, padded=False,
            tile=Tile(1, _SIZE, "single"),
        ),
        tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()),
        _search, lambda fields: Grid(fields["scales"]), _pack, floats=Floats(_nearest, _read),
        files=Files(
            (_LAYOUT,), ("fp8",), _states, written=_LAYOUT, experts_in_one=True, of_library=True,
            beside=("activation_scale",),
        ),
    )
}  # fmt: skip
