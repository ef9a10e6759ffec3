"""Weight files: checked before anything is loaded from them, in bounded memory.

A safetensors file is 8 bytes with the length of its header, the header (JSON: each tensor's type, shape and offsets),
and the tensors (https://github.com/huggingface/safetensors#format). Nothing in it is code. Its readers trust the
length up to 100 MB, from which the library makes 1.5 GiB of objects before it can refuse (safetensors 0.8: a header of
one tensor with 50 million dimensions).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch

from finetune.errors import ArtifactError
from finetune.storage import records

SUFFIX = ".safetensors"

# At some 130 bytes a tensor this is a quarter of a million of them; a mixture of 384 experts in 60 layers has half of
# that.
HEADER_BYTES = 32 * 2**20


def check(path: Path) -> None:
    """Refuse what is no whole safetensors file: a header over `HEADER_BYTES`, beyond the file's end, or no JSON;
    tensors that overlap, leave holes, or do not end where the file does.

    Reads the header alone. Raises ArtifactError naming the file.
    """
    from safetensors import SafetensorError, safe_open

    start = records.read_bytes(path, 8)
    size = path.stat().st_size
    if len(start) < 8:
        raise ArtifactError(f"{path}: cut off after {len(start)} bytes; make or fetch it again")
    (length,) = struct.unpack("<Q", start)
    if length > size - len(start):
        raise ArtifactError(
            f"{path}: its header of {length} bytes ends beyond the file of {size}: cut off, damaged, or no "
            f"{SUFFIX} file at all; make or fetch it again"
        )
    if length > HEADER_BYTES:
        raise ArtifactError(f"{path}: its header of {length} bytes is longer than {HEADER_BYTES}, which no model needs")
    try:
        # Checks types, shapes and places against each other and the file's length (safetensors 0.8, read_metadata).
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path}: damaged, or no {SUFFIX} file: {error}; make or fetch it again") from None


def shapes(path: Path) -> dict[str, list[int]]:
    """The tensors of a file that `check` let pass, by name."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as stored:
        return {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118 -- not a dict


def not_finite(path: Path) -> list[str]:
    """Names of the tensors of a file that `check` let pass which hold a NaN or an infinity."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        return [name for name in stored.keys() if not is_finite(stored.get_tensor(name))]  # noqa: SIM118 -- not a dict


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every number of `tensor` is finite; makes no copy of it."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(end) for end in torch.aminmax(tensor))  # a NaN is both
