"""What a card takes and does, measured there once and kept in this user's cache for later forecasts.

A forecast of a card that nothing was measured on takes a bound of the CUDA context, torch's default workspaces, and the
rates of the data sheet. A file for each kind of card, with its driver and torch; deleting it means measuring again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pydantic
import torch

from finetune.errors import first_line
from finetune.forecast import operator_costs
from finetune.model import precision
from finetune.model.precision import PRECISIONS
from finetune.runtime import driver, environment, libraries
from finetune.storage import private

Note = Callable[[str], None]

# Sides of the product, and numbers of float32 to copy: more than any card's caches hold.
_SIDE, _COPIED = 4096, 2**25
_RATE_BYTES = 2 * _COPIED * 4
# The most of the free memory that measuring takes, and the least share that is free of a card nobody else uses.
_MOST_TAKEN, _FREE_IF_ALONE = 1 / 8, 0.85
_SECONDS = 0.2


@dataclass(frozen=True)
class Figures:
    """What was measured on a card: bytes, operations a second and bytes a second; 0 for what was not."""

    context_bytes: int = 0
    workspace_bytes: int = 0
    flops: float = 0.0
    fp32_flops: float = 0.0
    bandwidth_bytes: float = 0.0


def known(device: torch.device) -> Figures:
    """What was measured on such a card before."""
    with contextlib.suppress(pydantic.ValidationError):
        figures = _figures().validate_json(private.read(_file(device)) or b"{}")
        if all(math.isfinite(value) and value >= 0 for value in asdict(figures).values()):
            return figures
    return Figures()


def rates(device: torch.device, note: Note) -> None:
    """Measure the rates of a card and the workspaces of its products, unless they are known.

    Takes a second, and at most an eighth of the free memory; not on a card that other processes use. A failure is a
    note.
    """
    if device.type == "cuda" and not known(device).bandwidth_bytes:
        _keep(device, "rates", lambda: _rates(device), note)


def context(device: torch.device, note: Note) -> None:
    """Measure the CUDA context of this process, which has loaded the kernels of a step, unless it is known.

    A failure is a note; a figure that other processes may have changed is not kept.
    """
    if device.type == "cuda" and not known(device).context_bytes:
        _keep(device, "memory", lambda: {"context_bytes": context_bytes(device)}, note)


def _keep(device: torch.device, what: str, measure: Callable[[], dict[str, Any]], note: Note) -> None:
    try:
        figures = replace(known(device), **measure())
    except Exception as error:  # a run does not depend on it
        note(f"the card's {what} could not be measured ({first_line(error)}): forecasts take its data sheet's")
        return
    with contextlib.suppress(OSError):
        private.write(_file(device), _figures().dump_json(figures))


def _rates(device: torch.device) -> dict[str, Any]:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if free_bytes < _FREE_IF_ALONE * total_bytes or free_bytes * _MOST_TAKEN < _RATE_BYTES:
        return {}
    dtype = PRECISIONS[precision.of_device(device).native[0]].dtype
    try:
        return {
            "flops": products(dtype, device),
            "fp32_flops": products(torch.float32, device),
            "bandwidth_bytes": copies(device),
            "workspace_bytes": 0 if "CUBLAS_WORKSPACE_CONFIG" in os.environ else workspace_bytes(dtype, device),
        }
    finally:
        libraries.return_freed_memory()


def products(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a large product."""
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(_SIDE, _SIDE, generator=generator, dtype=dtype, device=device)
    out = torch.empty_like(left)
    return 2 * _SIDE**3 / _seconds(lambda: torch.mm(left, left, out=out), device)


def copies(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy within the card's memory."""
    wide = torch.ones(_COPIED, device=device)
    out = torch.empty_like(wide)
    return 2 * wide.nbytes / _seconds(lambda: out.copy_(wide), device)


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


def context_bytes(device: torch.device) -> int:
    """GPU memory that this process uses outside the caching allocator; 0 if unclear.

    By NVML's figure for this process or, where NVML has none (in a container, under WSL2), by what is not free: other
    processes count then, so a figure far from the sizes read elsewhere (`operator_costs.context_bytes`) is rejected.
    """
    processes = driver.by_nvml(device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    used = next((process.usedGpuMemory for process in processes or () if process.pid == os.getpid()), None)
    if used is None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        used = total_bytes - free_bytes
    size = int(used) - torch.cuda.memory_reserved(device)
    expected = operator_costs.context_bytes(torch.cuda.get_device_properties(device).multi_processor_count)
    return size if expected // 4 <= size <= 2 * expected else 0


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest time that `work` takes within _SECONDS, in which the clocks of an idle card rise."""
    shortest, until = math.inf, time.perf_counter() + _SECONDS
    while (began := time.perf_counter()) < until:
        work()
        torch.cuda.synchronize(device)
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def _file(device: torch.device) -> Path:
    made_for = json.dumps([environment.hardware(device), torch.__version__], sort_keys=True)
    return private.folder_beside("cards") / f"{hashlib.sha256(made_for.encode()).hexdigest()[:32]}.json"


def _figures() -> pydantic.TypeAdapter[Figures]:
    return pydantic.TypeAdapter(Figures)
