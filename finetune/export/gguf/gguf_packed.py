"""Packed weights as tensors of a GGUF file: their bytes are written, and never decoded or rounded again.

llama.cpp stores rows of some weights in another order, or splits them; blocks lie within rows, so whole rows are moved.
Its MXFP4 and NVFP4 have the bytes of the published forms in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Types
from torch import nn

from finetune.errors import ConfigError
from finetune.export import row_selection
from finetune.forms import float_blocks, packed
from finetune.forms.block_fields import in_halves
from finetune.model.source.gguf_families import Parts

FLOATS = {"mxfp4": 32, "nvfp4": 64}
"""The forms of 4-bit floats, and the values in a block of a GGUF file."""

GgufTensor = tuple[str, list[int], Any, Callable[[], torch.Tensor]]
"""Name, shape of the values, GGUF type, and a function that loads the values, or the bytes in that type (uint8)."""


def tensors(name: str, weight: nn.Parameter, store: Callable[[torch.Tensor], Parts]) -> Iterator[GgufTensor]:
    """The tensors of a packed weight; `store` maps values in the model's shape to what llama.cpp stores of them.

    Raises ConfigError for a form that GGUF files do not have, and if `store` does more than choose rows.
    """
    how = packed.known_packing(weight)
    kind = Types.__members__.get(how.form.removeprefix("gguf_").upper())
    if kind is None:
        raise ConfigError(f"`{name}` is held in {how.form}, which GGUF files do not have; export `merged` instead")
    for part, rows in row_selection.chosen(name, how.shape, store, "llama.cpp", transposed=how.transposed).items():
        shape = [*rows.shape, how.shape[-2] if how.transposed else how.shape[-1]]
        if shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise ConfigError(
                f"`{name}` has rows of {shape[-1]} values, and {kind.name} in GGUF files blocks of "
                f"{GGML_QUANT_SIZES[kind][0]}; export `merged` instead"
            )
        yield part, shape, kind, functools.partial(_bytes, weight, rows)
        if how.form == "nvfp4":
            factors = _factors(name, how.scales, rows)
            scale = part.removesuffix("weight") + "scale"
            yield scale, list(factors.shape), Types.F32, functools.partial(torch.clone, factors)


def rounded(name: str, shape: list[int], kind: Any, load: Callable[[], torch.Tensor]) -> Iterator[GgufTensor]:
    """A tensor that is rounded to MXFP4 or NVFP4, which in llama.cpp's own files lacks the factor of each matrix."""

    def made() -> nn.Parameter:
        return packed.pack(kind.name.lower(), load())

    yield name, shape, kind, lambda: _bytes(made())
    if kind is Types.NVFP4:
        scale = name.removesuffix("weight") + "scale"
        yield scale, shape[:-2] or [1], Types.F32, lambda: _factors(name, packed.known_packing(made()).scales)


def _bytes(weight: nn.Parameter, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of rows of a weight (None: all), in the order of its GGUF type: (..., rows, bytes of a row)."""
    how = packed.known_packing(weight)
    codes, scales = (row_selection.bytes_of(each, rows) for each in (weight.data, how.scales))
    if how.form == "mxfp4":
        return float_blocks.pack_gguf_mxfp4(float_blocks.from_pairs(codes), {"exponents": scales})[0]
    if how.form == "nvfp4":
        four = scales[..., float_blocks.FACTOR_BYTES :].unflatten(-1, (-1, 4))
        halves = in_halves(float_blocks.from_pairs(codes), 16).unflatten(-2, (-1, 4)).flatten(-2)
        return torch.cat((four, halves), dim=-1).flatten(-2)
    return codes


def _factors(name: str, scales: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The factor of each matrix in float32: (matrices,). Products are multiplied by it in llama.cpp."""
    both = float_blocks.factors(row_selection.bytes_of(scales[..., : float_blocks.FACTOR_BYTES], rows))
    if (both != both[..., :1, :]).any():
        raise ConfigError(f"rows of `{name}` have different factors of NVFP4, of which a GGUF file has one a matrix")
    first = both[..., 0, :].reshape(-1, 2)
    return first[:, 0] / first[:, 1]
