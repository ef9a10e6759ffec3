"""Weight files, validated in bounded memory before anything is loaded from them.

A safetensors file is an 8-byte header length, the header (JSON: dtype, shape and offsets of each tensor), and the
tensors (https://github.com/huggingface/safetensors#format). It contains no code. The library accepts headers up to
100 MB, and allocates up to 1.5 GiB of objects before it rejects one (safetensors 0.8: one tensor with 50 million
dimensions).
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune.errors import ArtifactError
from finetune.storage import records

SUFFIX = ".safetensors"
INDEX = f"model{SUFFIX}.index.json"

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def check(path: Path) -> None:
    """Raise ArtifactError unless `path` is a complete safetensors file; only the header is read.

    Rejected are a header that exceeds the file or is not JSON, and tensors that overlap, leave gaps or do not end at
    the end of the file.
    """
    start = records.read_bytes(path, 8)
    size = path.stat().st_size
    if len(start) < 8:
        raise ArtifactError(f"{path}: cut off after {len(start)} bytes; create or download it again")
    if start == b"version ":  # https://git-lfs.github.com/spec/v1
        raise ArtifactError(f"{path}: a Git LFS pointer in place of the file; fetch it with `git lfs pull`")
    (length,) = struct.unpack("<Q", start)
    if length > size - len(start):
        raise ArtifactError(
            f"{path}: its header of {length} bytes exceeds the file of {size}: cut off, damaged, or not a "
            f"{SUFFIX} file; create or download it again"
        )
    try:
        # Checks dtypes, shapes and offsets against each other and the file size (safetensors 0.8, read_metadata).
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path}: damaged, or not a {SUFFIX} file: {error}; create or download it again") from None


@dataclass(frozen=True)
class FileLayout:
    """A weight file to be written: (dtype, shape) of each tensor, by name, in the order of the file."""

    tensors: dict[str, tuple[torch.dtype, torch.Size]]

    @functools.cached_property
    def header(self) -> bytes:
        """The bytes before the tensors."""
        offset = 0
        fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, (dtype, shape) in self.tensors.items():
            end = offset + dtype.itemsize * shape.numel()
            fields[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the tensors are read where they lie, and need to be aligned
        return struct.pack("<Q", len(text)) + text

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors."""
        return sum(dtype.itemsize * shape.numel() for dtype, shape in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.tensor_bytes


def write(path: Path, layout: FileLayout, tensors: Iterable[torch.Tensor]) -> None:
    """Write a file tensor by tensor, as `tensors` yields them in the order of `layout`. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    with open(partial, "wb") as file:
        file.write(layout.header)
        for tensor, (dtype, shape) in zip(tensors, layout.tensors.values(), strict=True):
            assert (tensor.dtype, tensor.shape) == (dtype, shape)
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def index(layouts: dict[str, FileLayout]) -> dict[str, Any]:
    """The content of `INDEX`: which of several files, by their names, has each tensor."""
    files = {tensor: name for name, layout in layouts.items() for tensor in layout.tensors}
    size = sum(layout.tensor_bytes for layout in layouts.values())
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}


def is_written(path: Path, layout: FileLayout) -> bool:
    """Whether `write` has written all of this file."""
    if not path.is_file() or path.stat().st_size != layout.bytes:
        return False
    with open(path, "rb") as file:
        return file.read(len(layout.header)) == layout.header


def layout_of(path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """(dtype, shape) of the tensors in a file that passed `check`, by name. Raises ArtifactError for other dtypes."""
    tensors = {}
    with safe_open(path, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 -- not a dict
            part = stored.get_slice(name)
            if (kind := part.get_dtype()) not in _DTYPES:
                raise ArtifactError(f"{path}: `{ascii(name)[1:-1][:100]}` has type {kind}, which is not supported")
            tensors[name] = _DTYPES[kind], torch.Size(part.get_shape())
    return tensors


def shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a file that passed `check`, by name."""
    with safe_open(path, framework="np") as stored:
        return {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118 -- not a dict


def not_finite(path: Path) -> list[str]:
    """Names of the tensors with NaN or infinity, in a file that passed `check`."""
    with safe_open(path, framework="pt") as stored:
        return [name for name in stored.keys() if not is_finite(stored.get_tensor(name))]  # noqa: SIM118 -- not a dict


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values of `tensor` are finite; copies only one of 8 bits, for which torch has no `aminmax`."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:
        tensor = tensor.float()
    return all(math.isfinite(end) for end in torch.aminmax(tensor))  # aminmax propagates NaN
