"""MXFP4: blocks of 32 floats of four bits with a power of two as scale, in the layouts of vLLM, gpt-oss and GGUF.

Sources: OCP Microscaling Formats v1.0; of GGUF's layout, ggml/src/ggml-quants.c of llama.cpp. Decoding is equal to
that of transformers (5.24, `Mxfp4Dequantize`).
"""

from __future__ import annotations

import torch

from finetune.forms import e2m1
from finetune.forms.block_fields import from_halves, in_halves, joined, split
from finetune.forms.codec import (
    BlockFields,
    Blocks,
    BytesAndScales,
    Codec,
    Files,
    Floats,
    Grid,
    InGguf,
    Layout,
    Tile,
    of_gguf,
)
from finetune.forms.compressed_tensors import stated


def _search(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    """Section 6.3: a block's scale is the power of two of its largest value over that of e2m1, 4; and 127 is added."""
    exponents = torch.frexp(e2m1.largest(weight, 32)).exponent - 3  # frexp's mantissa is below 1
    return {"exponents": (exponents.clamp_(-127, 127) + 127).to(torch.uint8)}


def _grid(fields: BlockFields) -> Grid:
    return Grid(e2m1.power_of_two(fields["exponents"].int() - 1))


def _pack(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return e2m1.in_pairs(codes), fields["exponents"]


def _read(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    dtype = torch.float32 if out.dtype is torch.float16 else out.dtype  # scales overflow in float16
    e2m1.decode_pairs(stored, _grid({"exponents": scales}).scales.to(dtype), out)


def _pack_in_gguf(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    return joined(fields["exponents"].unsqueeze(-1), in_halves(codes, 32))


def _unpack_in_gguf(stored: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    exponents, low = split(stored, 1, 16)
    return from_halves(low).flatten(-2), {"exponents": exponents.squeeze(-1)}


def _as_bytes(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8)


_OF_EXPERTS = Layout(
    ("_blocks", "_scales"), _as_bytes,
    # Codes (experts, rows, bytes) as (experts, rows, blocks, bytes), a block of 32 values each.
    write=lambda codes, scales, shape: (codes.view(*scales.shape, -1), scales),
    stated=lambda kept: {"quant_method": "mxfp4", "modules_to_not_convert": kept},
)  # fmt: skip

CODECS = {
    "mxfp4": Codec(
        Blocks(32, 32, 16, scales=1, tile=Tile(1, 16, "pairs", scales="exponents")), e2m1.TWICE, _search, _grid, _pack,
        floats=Floats(e2m1.nearest, _read),
        files=Files(
            (_OF_EXPERTS,), ("mxfp4",), lambda given: given.get("quant_method") == "mxfp4",
            written=Layout(
                ("_packed", "_scale"), _as_bytes, lambda codes, scales, shape: (codes, scales),
                stated("mxfp4-pack-quantized", 32, type="float", strategy="group", scale_dtype="torch.uint8"),
            ),
            of_experts=_OF_EXPERTS, experts_alone=True, of_library=True,
        ),
        gguf=InGguf(lambda codes, scales: _pack_in_gguf(e2m1.from_pairs(codes), {"exponents": scales})[0]),
    ),
    "gguf_mxfp4": Codec(
        # `kvalues_mxfp4`: integers, which have one zero.
        Blocks(32, 32, 17, tile=Tile(1, 16, apart=16)), tuple(level + 0.0 for level in e2m1.TWICE), _search, _grid,
        _pack_in_gguf, _unpack_in_gguf, Floats(e2m1.nearest), files=of_gguf("gguf_mxfp4"),
    ),
}  # fmt: skip
