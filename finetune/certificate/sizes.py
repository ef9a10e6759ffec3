"""Sizes on a GPU that a forecast otherwise takes from data sheets: the context, cuBLAS's workspaces, the segments."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import torch

from finetune.forecast import operator_costs
from finetune.forecast.allocator import CachingAllocator
from finetune.runtime import driver

# Length of the sequence: enough to split, join and cache blocks of both pools, with no more than a few hundred MiB.
_REQUESTS, _MOST_LIVE = 300, 20
_LEAST_POWER, _LARGEST_POWER = 9, 25


def context_bytes(free_before: int, device: torch.device) -> int | None:
    """GPU memory that this process uses outside the caching allocator once its kernels are loaded; None if unclear.

    Measured by NVML's figure for this process or, where NVML has none (in a container, under WSL2), by the decrease of
    free memory since `free_before`. Other processes may change the latter meanwhile, so a figure far from the sizes
    read elsewhere (`operator_costs.context_bytes`) is rejected.
    """
    used = _used_by_this_process(device)
    if used is None:
        used = free_before - torch.cuda.mem_get_info(device)[0]
    size = used - torch.cuda.memory_reserved(device)
    expected = operator_costs.context_bytes(torch.cuda.get_device_properties(device).multi_processor_count)
    return size if expected // 4 <= size <= 2 * expected else None


def _used_by_this_process(device: torch.device) -> int | None:
    processes = driver.by_nvml(device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    used: int | None = next((process.usedGpuMemory for process in processes or () if process.pid == os.getpid()), None)
    return used


def workspace_bytes(dtype: torch.dtype, device: torch.device) -> int:
    """Memory that cuBLAS and cuBLASLt hold in the caching allocator for the forward and the backward thread.

    Measured in one thread: each has handles, and with them workspaces, of its own (`operator_costs.workspace_bytes`).
    """
    matrix, bias = (torch.ones(size, dtype=dtype, device=device) for size in ((256, 256), (256,)))
    out = torch.empty_like(matrix)
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 -- torch has no public name for it
    before = torch.cuda.memory_allocated(device)
    torch.mm(matrix, matrix, out=out)
    torch.addmm(bias, matrix, matrix, out=out)
    return 2 * (torch.cuda.memory_allocated(device) - before)


def reserved_bytes(
    allocate: Callable[[int], object], reserved: Callable[[], int], model: CachingAllocator
) -> tuple[int, int]:  # fmt: skip
    """The most that a fresh allocator and its `model` reserve in a short sequence of requests and frees.

    `allocate` returns an object whose end frees its bytes.
    """
    generator = random.Random(0)
    live: list[tuple[object, int]] = []
    peak_bytes = 0
    for _ in range(_REQUESTS):
        if len(live) == _MOST_LIVE or (live and generator.random() < 0.45):
            _, handle = live.pop(generator.randrange(len(live)))
            model.free(handle)
        else:
            size = int(2 ** generator.uniform(_LEAST_POWER, _LARGEST_POWER))
            live.append((allocate(size), model.allocate(size)))
        peak_bytes = max(peak_bytes, reserved())
    return peak_bytes, model.peak_reserved_bytes
