"""Weight files, validated in bounded memory before anything is loaded from them.

A safetensors file is an 8-byte header length, the header (JSON: dtype, shape and offsets of each tensor), and the
tensors (https://github.com/huggingface/safetensors#format). It contains no code. The library accepts headers up to
100 MB, and allocates up to 1.5 GiB of objects before it rejects one (safetensors 0.8: one tensor with 50 million
dimensions).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch

from finetune.errors import ArtifactError
from finetune.storage import records

SUFFIX = ".safetensors"

# At about 130 bytes per tensor, 250,000 tensors; a model with 384 experts in each of 60 layers has half as many.
HEADER_BYTES = 32 * 2**20


def check(path: Path) -> None:
    """Raise ArtifactError unless `path` is a complete safetensors file; only the header is read.

    Rejected are a header that exceeds `HEADER_BYTES` or the file or is not JSON, and tensors that overlap, leave gaps
    or do not end at the end of the file.
    """
    from safetensors import SafetensorError, safe_open

    start = records.read_bytes(path, 8)
    size = path.stat().st_size
    if len(start) < 8:
        raise ArtifactError(f"{path}: cut off after {len(start)} bytes; create or download it again")
    (length,) = struct.unpack("<Q", start)
    if length > size - len(start):
        raise ArtifactError(
            f"{path}: its header of {length} bytes exceeds the file of {size}: cut off, damaged, or not a "
            f"{SUFFIX} file; create or download it again"
        )
    if length > HEADER_BYTES:
        raise ArtifactError(f"{path}: its header of {length} bytes is longer than {HEADER_BYTES}, which no model needs")
    try:
        # Checks dtypes, shapes and offsets against each other and the file size (safetensors 0.8, read_metadata).
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path}: damaged, or not a {SUFFIX} file: {error}; create or download it again") from None


def shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a file that passed `check`, by name."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as stored:
        return {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118 -- not a dict


def not_finite(path: Path) -> list[str]:
    """Names of the tensors with NaN or infinity, in a file that passed `check`."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        return [name for name in stored.keys() if not is_finite(stored.get_tensor(name))]  # noqa: SIM118 -- not a dict


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values of `tensor` are finite; does not copy it."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(end) for end in torch.aminmax(tensor))  # aminmax propagates NaN
