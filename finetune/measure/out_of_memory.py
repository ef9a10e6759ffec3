"""Which errors mean out of memory, and what they say."""

from __future__ import annotations

import torch

from finetune.errors import first_line

# What libraries say in a plain RuntimeError: torch's CPU allocator, torch where it maps a file, C++, and CUDA outside
# torch's own allocator.
_SAID = (
    "DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory", "Triton Error [CUDA]: out of memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in _SAID)


def reason(error: BaseException) -> str:
    """What an error that `is_out_of_memory` says, in one line."""
    return first_line(error, "no memory left")
