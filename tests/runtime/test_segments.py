"""Expandable segments: enabled where torch and the driver support them, unless the user decides, and forecast."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import lacks, sampled
from messages import refusal

from finetune.config import MemorySection
from finetune.errors import MachineError
from finetune.forecast import devices
from finetune.runtime import driver as nvidia
from finetune.runtime import environment, libraries, segments
from finetune.runtime.device import require_default_stream, this_device

GPU = 3
VIRTUAL_MEMORY, FILE_HANDLES = 102, 103
Install = Callable[..., Any]


class Driver:
    """A libcuda.so.1 that reports the given attributes for four GPUs."""

    def __init__(self, attributes: dict[int, int], fails: str = "") -> None:
        self._attributes, self._fails = attributes, fails

    def cuInit(self, flags: int) -> int:
        return 100 if self._fails == "cuInit" else 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 40 + ordinal
        return 0 if ordinal <= GPU else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        assert 40 <= device.value <= 40 + GPU, "a device is no ordinal"
        value._obj.value = self._attributes.get(attribute, 0)
        return 1 if self._fails == "cuDeviceGetAttribute" else 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Simulates a driver below a torch with CUDA; by default one on Linux with all attributes."""

    def install(
        attributes: dict[int, int] | None = None, fails: str = "", system: str = "linux", kernel: str = "6.8.0"
    ) -> Driver:
        able = {VIRTUAL_MEMORY: 1, FILE_HANDLES: 1} if attributes is None else attributes
        libcuda = Driver(able, fails)

        def load(name: str) -> Driver:
            if name != "libcuda.so.1" or fails == "library":
                raise OSError(name)
            return libcuda

        monkeypatch.setattr(nvidia, "ctypes", SimpleNamespace(CDLL=load, c_int=ctypes.c_int, byref=ctypes.byref))
        monkeypatch.setattr(nvidia, "sys", SimpleNamespace(platform=system))
        monkeypatch.setattr(platform, "release", lambda: kernel)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        segments.supported.cache_clear()
        nvidia.shares_managed_memory.cache_clear()
        return libcuda

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    torch._C._accelerator_setAllocatorSettings("")
    segments.supported.cache_clear()
    yield install
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch._C._accelerator_setAllocatorSettings("")
    segments.supported.cache_clear()
    nvidia.shares_managed_memory.cache_clear()


# -- where they are on -------------------------------------------------------------------------------------------------


@lacks(reason="torch 2.11 does not say how its allocator is set")
def test_segments_are_enabled_where_the_driver_supports_them(driver: Install) -> None:
    driver()
    assert segments.grow(GPU)
    assert not segments.setting(), "asking changes nothing"
    segments.enable(GPU)
    assert segments.setting() == "expandable_segments:True", "what torch was given"
    assert segments.grow(GPU)
    segments.enable(GPU)
    assert segments.setting() == "expandable_segments:True"


def test_segments_stay_off_without_full_support(
    driver: Install, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lacking in [
        {"attributes": {VIRTUAL_MEMORY: 1}}, {"attributes": {FILE_HANDLES: 1}}, {"fails": "cuInit"},
        {"fails": "cuDeviceGetAttribute"}, {"fails": "library"}, {"system": "win32"},
        {"kernel": "5.15.167.4-microsoft-standard-WSL2"},
    ]:  # fmt: skip
        with subtests.test(lacking=lacking):
            driver(**lacking)
            segments.enable(GPU)
            assert not segments.setting()
            assert not segments.grow(GPU)
    driver()
    assert not segments.grow(GPU + 1), "which is not there"
    monkeypatch.setattr(torch.version, "cuda", None)
    segments.supported.cache_clear()
    assert not segments.grow(GPU)


def test_under_wsl2_the_drivers_version_is_that_of_its_management_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
            assert size == len(text)
            text.value = b"581.80"
            return 0

    libraries_here = {"libnvidia-ml.so.1": Nvml()}
    monkeypatch.setattr(nvidia, "VERSION_FILE", nvidia.Path("/nowhere"))
    monkeypatch.setattr(nvidia.ctypes, "CDLL", libraries_here.__getitem__)
    assert nvidia.version() == "581.80"


@pytest.mark.parametrize("attributes", [{VIRTUAL_MEMORY: 1, FILE_HANDLES: 1}, {}])
@pytest.mark.parametrize(
    ("settings", "grow"),
    [
        ("expandable_segments:False", False), ("expandable_segments:True", True), ("max_split_size_mb:64", False),
        ("max_split_size_mb:64, expandable_segments : True", True),
    ],
)  # fmt: skip
@lacks(reason="torch 2.11 does not say how its allocator is set")
def test_the_setting_of_the_user_is_kept(
    attributes: dict[int, int], settings: str, grow: bool, driver: Install
) -> None:
    driver(attributes)
    torch._C._accelerator_setAllocatorSettings(settings)
    segments.enable(GPU)
    assert segments.setting() == settings
    assert segments.grow(GPU) is grow
    assert segments.grow_elsewhere() is grow


@lacks(reason="torch 2.11 does not say how its allocator is set")
@pytest.mark.slow
@pytest.mark.parametrize("variable", sampled(["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"], "PYTORCH_ALLOC_CONF"))
def test_allocator_settings_are_read_from_the_environment(variable: str) -> None:
    """With torch 2.13, and in a fork without its getter, which torch 2.11 lacks."""
    code = (
        "import os, torch\n"
        "child = os.fork()\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
        "else: del torch._C._accelerator_getAllocatorSettings\n"
        "from finetune.runtime import segments\n"
        "segments.supported = lambda gpu: True\n"
        "segments.enable(0); print(segments.setting(), segments.grow(0))"
    )
    plain = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**plain, variable: "expandable_segments:False"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["expandable_segments:False", "False"] * 2


# -- what knows of it --------------------------------------------------------------------------------------------------


@lacks(reason="torch 2.11 does not say how its allocator is set")
def test_run_forecast_and_run_directory_agree(driver: Install, l4: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(libraries, "triton_obstacle", lambda: None)
    for attributes, grow in (({}, False), ({VIRTUAL_MEMORY: 1, FILE_HANDLES: 1}, True)):
        driver(attributes)
        planned = devices.find("auto", MemorySection()), devices.here(torch.device("cuda", 0), MemorySection())
        device = this_device()
        assert ("expandable_segments:True" in segments.setting()) is grow
        assert [each.software.expandable_segments for each in planned] == [grow, grow]
        assert environment.describe(device)["device"]["expandable_segments"] is grow


def test_a_plan_knows_whether_the_driver_shares_managed_memory(
    driver: Install, l4: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "triton_obstacle", lambda: None)
    for attributes, shared in (({83: 1, 89: 1}, True), ({83: 1}, False), ({89: 1}, False), ({}, False)):
        driver(attributes)
        assert nvidia.shares_managed_memory(GPU) is shared
        assert devices.here(torch.device("cuda", 0), MemorySection()).software.managed_memory is shared


def test_training_in_another_stream_than_the_default_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_default_stream(torch.device("cpu"))
    gpu, streams = torch.device("cuda", 0), ["default", "own"]
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: streams[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    with refusal(MachineError, "default stream"):
        require_default_stream(gpu)
    streams.pop()
    require_default_stream(gpu)


@lacks(reason="torch 2.11 does not say how its allocator is set")
def test_plans_assume_segments_on_cards_elsewhere_but_not_on_cpus(driver: Install) -> None:
    assert devices.find("RTX 4090", MemorySection()).software.expandable_segments
    assert devices.find("24GiB", MemorySection()).software.expandable_segments
    assert not devices.find("cpu", MemorySection()).software.expandable_segments
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert not devices.find("RTX 4090", MemorySection()).software.expandable_segments


@pytest.mark.slow
def test_a_forecast_reports_whether_segments_grow() -> None:
    import tiny_models
    from rich.console import Console

    from finetune.forecast import job_forecast, replay
    from finetune.report import forecast_view

    card = devices.find("RTX 4090", MemorySection())
    trace = tiny_models.trace(tiny_models.config(), tiny_models.architecture(layers=1), where=card)
    found = {
        grow: job_forecast.make(
            trace,
            dataclasses.replace(card, software=devices.Software(expandable_segments=grow)),
            tiny_models.BATCH,
            "sdpa",
            replay.RunSetting(),
        )
        for grow in (True, False)
    }
    for grow, made in found.items():
        assert json.loads(json.dumps(made.as_dict()))["expandable_segments"] is grow
        console = Console(record=True, width=120, file=io.StringIO())
        forecast_view.show(made, console)
        assert ("expandable segments" in console.export_text()) is grow
    # A block of fixed segments keeps up to 1 MiB that is too little to split off.
    assert found[True].peak_allocated_bytes <= found[False].peak_allocated_bytes
