"""Recognises out-of-memory errors, and turns those that no smaller step would avoid into OutOfMemoryError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from finetune.errors import OutOfMemoryError, first_line

# Messages of plain RuntimeErrors: torch's CPU allocator, torch mapping a file, C++, and CUDA outside torch's allocator:
# runtime, driver (c10/cuda/driver_api.h: expandable segments), Triton, cuBLAS in a product and for its handle (which
# needs memory of its own), and NCCL, whose message torch puts into a DistBackendError.
_MESSAGES = (
    "DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc",
    "CUDA error: out of memory", "CUDA driver error: out of memory", "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "Cuda failure 2 'out of memory'",
)  # fmt: skip


class StepOutOfMemoryError(torch.OutOfMemoryError):
    """Out of memory in a step, with what is known of it.

    `on_all_ranks`: all ranks raise it alike, so that one of them reports it. `next_start`: see `OutOfMemoryError`.
    """

    def __init__(self, message: str, *, on_all_ranks: bool = False, next_start: str = "") -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks
        self.next_start = next_start


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
