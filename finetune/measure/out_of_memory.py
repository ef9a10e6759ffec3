"""Recognises out-of-memory errors."""

from __future__ import annotations

import torch

from finetune.errors import first_line

# Texts of plain RuntimeErrors: torch's CPU allocator, torch mapping a file, C++, and CUDA outside torch's allocator.
_SAID = (
    "DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory", "Triton Error [CUDA]: out of memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a device or the host ran out of memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in _SAID)


def reason(error: BaseException) -> str:
    """The message of an out-of-memory error, in one line."""
    return first_line(error, "no memory left")
