"""Recognises out-of-memory errors, and turns those that no smaller step would avoid into OutOfMemoryError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from finetune.errors import OutOfMemoryError, first_line

# Messages of plain RuntimeErrors: torch's CPU allocator, torch mapping a file, C++, and CUDA outside torch's allocator.
_MESSAGES = (
    "DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory", "Triton Error [CUDA]: out of memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error means that a device or the host ran out of memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in _MESSAGES)


def reason(error: BaseException) -> str:
    """The message of an out-of-memory error, in one line."""
    return first_line(error, "no memory left")


@contextlib.contextmanager
def as_out_of_memory_error(doing: str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemoryError, with `remedy`, if the block runs out of memory; for work that no smaller step avoids."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"out of memory while {doing}: {reason(error)}\n{remedy}") from None


def while_writing(target: Path) -> contextlib.AbstractContextManager[None]:
    """`as_out_of_memory_error` for a block that writes weights."""
    return as_out_of_memory_error(
        f"writing {target}",
        "What is written is copied to host memory first: free some, or use a machine with more. The same command goes "
        "on from the last checkpoint",
    )
