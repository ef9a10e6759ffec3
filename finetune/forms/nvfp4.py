"""NVFP4: blocks of 16 floats of four bits with a scale in e4m3, and one factor of all scales of a weight.

Sources: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), compressed-tensors (0.20), ModelOpt
(`modelopt/torch/quantization/qtensor/nvfp4_tensor.py`); of GGUF's layout, ggml/src/ggml-quants.c of llama.cpp.

The scales of a row begin with two factors in float32: one multiplies them, one divides them. A weight has one such
factor. ModelOpt publishes that which multiplies, compressed-tensors that which divides; the other is 1. As rows have
their own, weights can be joined, such as those of experts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from finetune.errors import ConfigError
from finetune.forms import e2m1
from finetune.forms.block_fields import in_halves
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
    OfWhole,
    Tile,
)
from finetune.forms.compressed_tensors import stated

_FACTOR_BYTES = 8
"""Bytes of the two factors with which the scales of a row begin."""
_E4M3 = torch.finfo(torch.float8_e4m3fn)
_SMALLEST_E4M3 = _E4M3.smallest_normal / 8


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """The factors (..., rows, 2) of the scales of a packed weight."""
    return scales[..., :_FACTOR_BYTES].contiguous().view(torch.float32)


def _factors_of(largest: torch.Tensor) -> torch.Tensor:
    """The factors (..., 2) of weights, or experts, with these largest values (...), which become 6 times 448."""
    divisor = (_E4M3.max * e2m1.LARGEST / largest).nan_to_num_(nan=1.0, posinf=1.0)
    return torch.stack((torch.ones_like(divisor), divisor), dim=-1)


def _search(weight: torch.Tensor, importance: torch.Tensor | None) -> BlockFields:
    both = _factors_of(weight.abs().amax((-2, -1))).unsqueeze(-2)
    return _fields(weight, both.repeat_interleave(weight.shape[-2], -2))


def _fields(weight: torch.Tensor, factors: torch.Tensor) -> BlockFields:
    """The fields for factors (..., rows, 2): a block's largest value becomes 6, and 0 would be no scale."""
    each = (factors[..., 1:] * (e2m1.largest(weight, 16) / e2m1.LARGEST)).clamp_(_SMALLEST_E4M3, _E4M3.max)
    return {"factors": factors, "scales": each.to(torch.float8_e4m3fn)}


def _begin(weight: torch.Tensor, scales: torch.Tensor) -> None:
    largest = torch.maximum(weight.amax((-2, -1)), -weight.amin((-2, -1))).float()
    scales[..., :_FACTOR_BYTES] = _factors_of(largest).view(torch.uint8).unsqueeze(-2)


def _grid(fields: BlockFields) -> Grid:
    return Grid(fields["scales"].float() * fields["factors"][..., :1] / fields["factors"][..., 1:] * 0.5)


def _pack(codes: torch.Tensor, fields: BlockFields) -> BytesAndScales:
    scales = torch.cat([fields[name].contiguous().view(torch.uint8) for name in ("factors", "scales")], dim=-1)
    return e2m1.in_pairs(codes), scales


def _read(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    each = scales[..., _FACTOR_BYTES:].contiguous().view(torch.float8_e4m3fn)
    e2m1.decode_pairs(stored, _grid({"factors": _factors(scales), "scales": each}).scales, out)


# -- in files ----------------------------------------------------------------------------------------------------------


def _joined(scales: torch.Tensor, factor: torch.Tensor, *, divides: bool) -> torch.Tensor:
    """The scales of a `Packing` from those of files, whose `factor` divides or multiplies them."""
    if factor.numel() != 1:
        raise ValueError(f"the factor of its scales has the shape {list(factor.shape)}")
    own = factor.float().reshape(1)
    both = (torch.ones_like(own), own) if divides else (own, torch.ones_like(own))
    each = torch.cat(both).view(torch.uint8)
    return torch.cat((each.expand(*scales.shape[:-1], _FACTOR_BYTES), scales.view(torch.uint8)), dim=-1)


def _write(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    factors = _factors(scales)
    if not scales.is_meta and ((factors != factors[:1]).any() or factors[0, 0] != 1):
        raise ConfigError("rows of a matrix in NVFP4 have different factors, of which a file has one divisor a matrix")
    each = scales[..., _FACTOR_BYTES:].contiguous().view(torch.float8_e4m3fn)
    return codes, each, factors[0, 1:].clone()  # the reciprocal of what ModelOpt writes


def _states(given: Mapping[str, Any]) -> bool:
    """Whether config.json says that compressed-tensors or ModelOpt has put all linear layers but some in NVFP4.

    Not with rotated weights, other forms beside it, or inputs that are scaled before a layer (`NVFP4_AWQ`).
    """
    groups = given.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    sizes = [given.get("group_size", 16), *(each.get("group_size", 16) for each in weights)]
    if given.get("quant_method") in ("modelopt", "modelopt_fp4"):
        return given.get("quant_algo") in ("NVFP4", "W4A16_NVFP4") and set(sizes) == {16}
    formats = {given.get("format"), *(group.get("format") or given.get("format") for group in groups.values())}
    plain = not given.get("transform_config") and all(each.get("symmetric", True) for each in weights)
    targets = [group.get("targets") for group in groups.values()]
    return plain and formats == {"nvfp4-pack-quantized"} and targets == [["Linear"]] and set(sizes) == {16}


def _left_out(given: Mapping[str, Any]) -> list[str]:
    """compressed-tensors has names and, after `re:`, beginnings of them; ModelOpt names with `*`."""
    names = given.get("ignore") or given.get("exclude_modules") or ()
    return [f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name).replace(r"\*", ".*") for name in names]


def _in_gguf(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    four = scales[..., _FACTOR_BYTES:].unflatten(-1, (-1, 4))
    halves = in_halves(e2m1.from_pairs(codes), 16).unflatten(-2, (-1, 4)).flatten(-2)
    return torch.cat((four, halves), dim=-1).flatten(-2)


def _factor_in_gguf(scales: torch.Tensor) -> torch.Tensor:
    """The factor of each matrix in float32: (matrices,)."""
    both = _factors(scales)
    if (both != both[..., :1, :]).any():
        raise ValueError("different factors of NVFP4, of which a GGUF file has one a matrix")
    first = both[..., 0, :].reshape(-1, 2)
    return first[:, 0] / first[:, 1]


_COMPRESSED = Layout(
    # `quantization/lifecycle/forward.py`
    ("_packed", "_scale", "_global_scale"), functools.partial(_joined, divides=True), _write,
    stated("nvfp4-pack-quantized", 16, type="float", strategy="tensor_group"),
)  # fmt: skip

CODECS = {
    "nvfp4": Codec(
        Blocks(16, 16, 8, scales=1, row_scales=_FACTOR_BYTES, tile=Tile(1, 8, "pairs", scales="factors")), e2m1.TWICE,
        _search, _grid, _pack, floats=Floats(e2m1.nearest, _read),
        of_whole=OfWhole(_begin, lambda weight, scales: _fields(weight, _factors(scales))),
        files=Files(
            (_COMPRESSED, Layout(("", "_scale", "_scale_2"), functools.partial(_joined, divides=False))),
            ("compressed-tensors", "modelopt", "modelopt_fp4"), _states, _left_out, written=_COMPRESSED,
        ),
        gguf=InGguf(_in_gguf, _factor_in_gguf, fallback="q8_0"),
    )
}  # fmt: skip
