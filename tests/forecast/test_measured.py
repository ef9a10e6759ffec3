"""What was measured on a card replaces its data sheet in later forecasts; a fake driver answers here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forecasts import GIB

from finetune.config import MemorySection
from finetune.forecast import devices, measured, operator_costs
from finetune.model import precision
from finetune.runtime import libraries, segments
from finetune.storage import private

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
MIB = 2**20
RATES = {"flops": 1e14, "fp32_flops": 3e13, "bandwidth_bytes": 2e11, "workspace_bytes": 32 * MIB}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """An L4 of 22 GiB with `free` bytes, of which this process has `reserved`; NVML is missing, the cache empty."""
    gpu = SimpleNamespace(total=22 * GIB, free=21 * GIB, reserved=0)
    properties = SimpleNamespace(
        name="NVIDIA L4", total_memory=gpu.total, multi_processor_count=58, major=8, minor=9, uuid="1"
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (gpu.free, gpu.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: gpu.reserved)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(segments, "grow", lambda index: True)
    return gpu


@pytest.fixture
def notes() -> list[str]:
    return []


def test_figures_are_measured_once_and_replace_the_data_sheet(gpu, notes, monkeypatch) -> None:
    plain = devices.here(GPU, MemorySection())
    assert plain.outside_bytes == operator_costs.context_bytes(58)
    times: list[str] = []
    monkeypatch.setattr(measured, "_rates", lambda device: times.append("rates") or RATES)
    monkeypatch.setattr(measured, "context_bytes", lambda device: times.append("context") or 240 * MIB)
    for _ in range(2):
        measured.rates(GPU, notes.append)
        measured.context(GPU, notes.append)
    assert times == ["rates", "context"]
    assert not notes
    card = devices.here(GPU, MemorySection())
    assert card.outside_bytes == 240 * MIB
    assert card.room_bytes == plain.room_bytes == gpu.free, "the context counts on both sides"
    assert (card.rates.flops, card.rates.fp32_flops, card.rates.bandwidth_bytes) == (1e14, 3e13, 2e11)
    assert card.workspace_bytes == 32 * MIB != plain.workspace_bytes
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert devices.here(GPU, MemorySection()).workspace_bytes == operator_costs.workspace_bytes((8, 9), ":16:8")
    gpu.total -= GIB
    monkeypatch.setattr(torch, "__version__", "99")
    assert measured.known(GPU) == measured.Figures(), "measured anew with another torch"


def test_rates_are_measured_by_products_and_copies_in_the_precision_of_the_card(gpu, monkeypatch) -> None:
    monkeypatch.setattr(measured, "_SIDE", 64)
    monkeypatch.setattr(measured, "_COPIED", 2**12)
    monkeypatch.setattr(measured, "_SECONDS", 0.01)
    monkeypatch.setattr(precision, "of_device", lambda device: SimpleNamespace(native=("bf16", "fp32")))
    monkeypatch.setattr(measured, "workspace_bytes", lambda dtype, device: dtype.itemsize)
    monkeypatch.setattr(libraries, "return_freed_memory", lambda: None)
    state = torch.get_rng_state()
    figures = measured._rates(CPU)
    assert torch.equal(torch.get_rng_state(), state), "training draws the same random numbers"
    assert figures["workspace_bytes"] == 2
    assert min(figures["flops"], figures["fp32_flops"], figures["bandwidth_bytes"]) > 0


@pytest.mark.parametrize(("total", "free"), [(22 * GIB, 12 * GIB), (2 * GIB, int(1.9 * GIB))])
def test_nothing_is_measured_beside_other_processes_or_in_a_large_part_of_the_memory(
    total: int, free: int, gpu, notes, monkeypatch
) -> None:
    gpu.total, gpu.free = total, free
    monkeypatch.setattr(measured, "products", lambda dtype, device: pytest.fail("it was"))
    measured.rates(GPU, notes.append)
    assert measured.known(GPU) == measured.Figures()
    assert not notes


def test_a_failure_is_a_note(gpu, notes, monkeypatch) -> None:
    def fail(*given: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measured, "_rates", fail)
    monkeypatch.setattr(measured, "context_bytes", fail)
    measured.rates(GPU, notes.append)
    measured.context(GPU, notes.append)
    assert len(notes) == 2
    assert all("CUDA out of memory" in note and "\n" not in note for note in notes)


def test_a_damaged_file_counts_as_none(gpu) -> None:
    for content in ("", "[]", '{"flops": -1}', '{"flops": NaN}', '{"context_bytes": "x"}'):
        private.write(measured._file(GPU), content.encode())
        assert measured.known(GPU) == measured.Figures(), content


def test_a_cpu_is_not_measured(gpu, notes, monkeypatch) -> None:
    monkeypatch.setattr(measured, "_keep", lambda *given: pytest.fail("it was"))
    measured.rates(CPU, notes.append)
    measured.context(CPU, notes.append)


def test_the_context_is_what_is_not_free_beside_the_allocator_or_nvmls_figure(gpu, monkeypatch) -> None:
    gpu.reserved = GIB
    gpu.free = gpu.total - GIB - 240 * MIB
    assert measured.context_bytes(GPU) == 240 * MIB
    gpu.free -= 3 * GIB
    assert measured.context_bytes(GPU) == 0, "another process has come"
    used = [SimpleNamespace(pid=1, usedGpuMemory=5), SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB + 236 * MIB)]
    nvml = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses={"GPU-1": used}.__getitem__,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert measured.context_bytes(GPU) == 236 * MIB


def test_workspaces_are_what_a_product_leaves_in_the_allocator_for_each_of_two_threads(monkeypatch) -> None:
    allocated = iter([100, 100 + 8 * MIB])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    assert measured.workspace_bytes(torch.bfloat16, CPU) == 16 * MIB
