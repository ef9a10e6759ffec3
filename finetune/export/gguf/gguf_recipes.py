"""Files of several types: the one that llama.cpp's recipes give a tensor, and quantization by llama.cpp's own function.

The `gguf` package reads K-quants and IQ4_XS and does not write them; the `xllamacpp` wheel exports ggml's function that
does. The recipes are in `finetune.model.structure.recipes`. Small files of Llama, Mistral, Qwen 2.5 and 3, Gemma 2 and
3, and Phi 4 were equal to those that `llama_model_quantize` (b11739) makes from a bfloat16 file, in the bytes of all
tensors; the rules for 80 layers and for experts were read, not run.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Types
from gguf import quant_shape_to_byte_shape

from finetune.errors import MachineError
from finetune.forms import FORMS
from finetune.model.structure import recipes


def check(kind: str) -> None:
    """Raise MachineError if nothing installed quantizes to `kind` (a key of `gguf_types.TYPES`)."""
    try:
        function()
    except (ImportError, OSError, AttributeError):
        raise MachineError(
            f"GGUF type `{kind}` is quantized by llama.cpp: `pip install xllamacpp` (34 MB), or export `f16` and run "
            f"`llama-quantize model-f16.gguf model-{kind}.gguf {kind}`"
        ) from None


def type_of(name: str, kind: str, config: Any) -> Any:
    """The type of the matrix `name` in a file of `kind`; `config` is transformers' of the model."""
    if not FORMS[kind].recipe:
        # llama.cpp has no recipe for all matrices, and reads no factor beside an embedding.
        return Types.Q8_0 if name in (recipes.HEAD, recipes.EMBEDDING) else Types[kind.upper()]
    return Types[(recipes.wanted(name, kind, config) or "f16").upper()]


BY_GGML = (Types.Q4_K, Types.Q5_K, Types.Q6_K, Types.IQ4_XS, Types.IQ4_NL)
"""Types that `quantize` writes."""


def fallback(kind: Any) -> Any:
    """The type that replaces one whose blocks do not divide a row; None if there is none."""
    form = FORMS.get(kind.name.lower())
    replacing = form.codec.gguf.fallback if form and form.module else None
    return replacing and Types[replacing.upper()]


def quantize(matrix: np.ndarray, kind: Any) -> np.ndarray:
    """The bytes of a float32 matrix in a type of `BY_GGML`: (rows, bytes of a row)."""
    matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    quantized = np.empty(quant_shape_to_byte_shape(matrix.shape, kind), dtype=np.uint8)
    rows, width = matrix.shape

    def some(start: int) -> None:
        count = min(each, rows - start)
        function()(kind, matrix.ctypes.data, quantized.ctypes.data, start * width, count, width, None)

    threads = torch.get_num_threads()
    each = -(-rows // threads)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, range(0, rows, each)))
    return quantized


@functools.cache
def function() -> Any:
    """ggml's `ggml_quantize_chunk(type, from, to, first element, rows, row length, importance)`."""
    module = importlib.util.find_spec("xllamacpp.xllamacpp")
    function = ctypes.CDLL(str(module and module.origin)).ggml_quantize_chunk
    function.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    function.restype = ctypes.c_size_t
    return function
