"""What counts as out of memory, by the texts of torch and the libraries under it."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from finetune.measure.out_of_memory import is_out_of_memory

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul(...)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        dist.DistBackendError(NCCL),
    ],
    ids=lambda error: str(error)[:40] or type(error).__name__,
)
def test_these_are_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA driver error: unknown error",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
        "Last error:\nCuda failure 1 'invalid argument'",
    ],
)
def test_these_are_not(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
