"""Packed weights as tensors of a GGUF file: their bytes are written, and never decoded or rounded again.

llama.cpp stores rows of some weights in another order, or splits them; blocks lie within rows, so whole rows are moved.
Some forms have their bytes in another order there.
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
from finetune.forms import FORMS, packed
from finetune.model.source.gguf_families import Parts

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
        if FORMS[how.form].codec.gguf.factor:
            factors = _factors(name, weight, rows)
            scale = part.removesuffix("weight") + "scale"
            yield scale, list(factors.shape), Types.F32, functools.partial(torch.clone, factors)


def rounded(name: str, shape: list[int], kind: Any, load: Callable[[], torch.Tensor]) -> Iterator[GgufTensor]:
    """A tensor that is rounded to a form; with the factor of each matrix, which llama.cpp's own files lack."""
    form = kind.name.lower()

    def made() -> nn.Parameter:
        return packed.pack(form, load())

    yield name, shape, kind, lambda: _bytes(made())
    if FORMS[form].codec.gguf.factor:
        scale = name.removesuffix("weight") + "scale"
        yield scale, shape[:-2] or [1], Types.F32, lambda: _factors(name, made())


def _bytes(weight: nn.Parameter, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of rows of a weight (None: all), in the order of its GGUF type: (..., rows, bytes of a row)."""
    how = packed.known_packing(weight)
    codes, scales = (row_selection.bytes_of(each, rows) for each in (weight.data, how.scales))
    encode = FORMS[how.form].codec.gguf.encode
    return encode(codes, scales) if encode else codes


def _factors(name: str, weight: nn.Parameter, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The factor of each matrix in float32: (matrices,). Products are multiplied by it in llama.cpp."""
    how = packed.known_packing(weight)
    factor = FORMS[how.form].codec.gguf.factor
    assert factor
    try:
        return factor(row_selection.bytes_of(how.scales, rows))
    except ValueError as error:
        raise ConfigError(f"rows of `{name}` have {error}") from None
