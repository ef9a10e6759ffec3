"""What only a GPU tells is measured by functions that a fake driver answers here, and replaces the data sheet."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from forecasts import GIB

from finetune.certificate import sizes, small_model, trials, verdict
from finetune.config import MemorySection
from finetune.forecast import devices, operator_costs
from finetune.forecast.allocator import CachingAllocator
from finetune.forecast.replay import Replay
from finetune.forecast.trace import Trace
from finetune.kernels import ops
from finetune.model.recompute import checkpointing
from finetune.runtime import segments
from finetune.storage.records import TrialResult

GPU = torch.device("cuda", 0)
MIB = 2**20


class Block:
    """What a fake device has allocated; freed at its end, as a tensor is."""

    def __init__(self, allocator: CachingAllocator, size: int) -> None:
        self.allocator, self.handle = allocator, allocator.allocate(size)

    def __del__(self) -> None:
        self.allocator.free(self.handle)


@pytest.mark.parametrize(("grow_there", "equal"), [(True, True), (False, False)])
def test_an_allocator_that_reserves_more_than_its_model_is_seen(grow_there, equal) -> None:
    there = CachingAllocator(expandable_segments=grow_there)
    measured, forecast = sizes.reserved_bytes(
        lambda size: Block(there, size), lambda: there.reserved_bytes, CachingAllocator(expandable_segments=True)
    )
    assert (measured == forecast) == equal
    assert measured >= forecast > 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An L4 of 22 GiB with `free` bytes, of which this process has `reserved`; NVML is missing."""
    gpu = SimpleNamespace(total=22 * GIB, free=20 * GIB, reserved=GIB)
    properties = SimpleNamespace(
        name="NVIDIA L4", total_memory=gpu.total, multi_processor_count=58, major=8, minor=9, uuid="1"
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (gpu.free, gpu.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: gpu.reserved)
    monkeypatch.setattr(segments, "grow", lambda index: True)
    return gpu


def test_the_context_is_what_is_gone_beside_the_allocator_or_nvmls_figure(gpu, monkeypatch) -> None:
    assert sizes.context_bytes(gpu.free + gpu.reserved + 240 * MIB, GPU) == 240 * MIB
    assert sizes.context_bytes(gpu.free + gpu.reserved + 3 * GIB, GPU) is None, "another process has come"
    assert sizes.context_bytes(gpu.free, GPU) is None, "another process has gone"
    used = [SimpleNamespace(pid=1, usedGpuMemory=5), SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB + 236 * MIB)]
    nvml = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses={"GPU-1": used}.__getitem__,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert sizes.context_bytes(gpu.free, GPU) == 236 * MIB


def test_workspaces_are_what_a_product_leaves_in_the_allocator_for_each_of_two_threads(monkeypatch) -> None:
    allocated = iter([100, 100 + 8 * MIB])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    assert sizes.workspace_bytes(torch.bfloat16, torch.device("cpu")) == 16 * MIB


def results(**figures: dict[str, float]) -> list[TrialResult]:
    return [TrialResult(name, "held", "", values) for name, values in figures.items()]


def test_what_was_measured_replaces_the_data_sheet(gpu) -> None:
    gpu.free, gpu.reserved = 20 * GIB, 0
    plain = verdict.Certificate().here(GPU, MemorySection())
    assert plain == devices.here(GPU, MemorySection())
    assert plain.outside_bytes == operator_costs.context_bytes(58)
    measured = verdict.Certificate(
        results(
            memory={"context_bytes": 240 * MIB, "forward_reserved_bytes": 1.0},
            rates={"flops": 1e14, "bandwidth_bytes": 2e11, "workspace_bytes": 32 * MIB},
            reserved={"reserved_bytes": 110.0, "forecast_reserved_bytes": 100.0},
        )
    ).here(GPU, MemorySection())
    assert measured.outside_bytes == 240 * MIB
    assert measured.room_bytes == plain.room_bytes == gpu.free, "the context counts on both sides"
    assert (measured.flops, measured.bandwidth_bytes, measured.workspace_bytes) == (1e14, 2e11, 32 * MIB)
    assert measured.reserved_share == 1.1
    failed = [TrialResult(name, "failed", "it differs") for name in ("segments", "optimizer", "offload", "large")]
    off = verdict.Certificate(failed).here(GPU, MemorySection())
    assert (off.expandable_segments, off.managed_memory, off.offloads) == (False, False, False)
    assert off.kernels_off == ("mlp", "norm")


def test_a_forecast_counts_what_the_allocator_was_seen_to_reserve() -> None:
    card, reserved = tiny_models.card(), []
    for share in (1.0, 1.5):
        replay = Replay(Trace([], []), dataclasses.replace(card, reserved_share=share), ("workspace",))
        replay._add(10 * MIB, "workspace")
        reserved.append(replay.reserved_bytes)
    assert reserved[1] == 1.5 * reserved[0] > 0


# -- trials of a GPU, on this machine's device -------------------------------------------------------------------------


def tried(**changes: Any) -> small_model.TriedJob:
    job = small_model.TriedJob(
        tiny_models.config(), tiny_models.architecture("windows"), "sdpa", torch.device("cpu"), 2, 24
    )
    return dataclasses.replace(job, **changes)


def test_a_result_of_more_elements_than_32_bits_count_is_tried_where_it_fits(monkeypatch) -> None:
    with pytest.raises(trials.Skipped, match="takes 8 GiB, and this GPU has 4"):
        trials._large(tried(device=GPU, total_bytes=4 * GIB), ())
    monkeypatch.setattr(trials, "_LARGE_ELEMENTS", 2**12)
    assert trials._large(tried(), ()) == {}

    def wrong_beyond(gate: Any, up: Any, activation: str) -> torch.Tensor:
        result = torch.nn.functional.silu(gate) * up
        result.view(-1)[2**12 :] = 0
        return result

    monkeypatch.setattr(ops, "gated", wrong_beyond)
    with pytest.raises(trials.Refuted, match="`gated` computes other elements beyond the first 4,096"):
        trials._large(tried(), ())


@pytest.mark.slow
def test_offloading_must_give_gradients_that_are_equal_to_the_bit(monkeypatch) -> None:
    assert trials._offload(tried(), ()) == {}
    apply = checkpointing.apply

    def late_copies(model: Any, section: MemorySection, device_type: str) -> None:
        apply(model, section, device_type)
        if section.offload == "checkpoints":
            checkpointing.layers(model)[0].register_forward_hook(lambda layer, args, output: output * 1.1)

    monkeypatch.setattr(checkpointing, "apply", late_copies)
    with pytest.raises(trials.Refuted, match="output is another one, as are"):
        trials._offload(tried(), ())


@pytest.mark.slow
def test_the_peaks_of_each_phase_stand_beside_the_forecast(monkeypatch) -> None:
    counts = itertools.count(1)
    for measure in ("allocated", "reserved"):
        monkeypatch.setattr(torch.cuda, f"max_memory_{measure}", lambda device: next(counts))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(sizes, "context_bytes", lambda free, device: 7)
    figures = trials._memory(tried(), trials.FUSED)
    for phase in ("forward", "backward", "optimizer"):
        for measure in ("allocated_bytes", "reserved_bytes"):
            assert {f"{phase}_{measure}", f"forecast_{phase}_{measure}"} <= figures.keys()
    assert figures["context_bytes"] == 7
    assert figures["optimizer_reserved_bytes"] == next(counts) - 1, "the largest of all steps"
