"""The energy of a run: read from the driver, recorded where it is known, and reported for whole runs alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.measure import energy
from finetune.results.figures import Figures
from finetune.storage.rundir import RunDirectory

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class NVMLError(Exception):
    pass


class Driver:
    """The module `pynvml` for one GPU, whose counter goes on by `step` millijoules, 90 kJ, from read to read."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.uuid, self.failing = "GPU-1234", ""
        self.millijoules, self.step = 200_000_000, 90_000_000

    def nvmlInit(self) -> None:
        self._fail_if("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._fail_if("nvmlDeviceGetTotalEnergyConsumption")
        self.millijoules += self.step
        return self.millijoules

    def _fail_if(self, name: str) -> None:
        if name == self.failing:
            raise NVMLError(name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    return made


def test_the_event_has_the_difference_of_the_counter(driver: Driver, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with energy.recorded(run, GPU):
        pass
    assert [(event["event"], event["joules"]) for event in run.events()] == [("energy", 90_000)]


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetTotalEnergyConsumption"])
def test_a_gpu_that_does_not_count_has_none(driver: Driver, tmp_path: Path, failing: str) -> None:
    driver.failing = failing
    with energy.recorded(RunDirectory(tmp_path), GPU):
        pass
    driver.failing, driver.uuid = "", "GPU-5678"
    assert energy.counted_joules(GPU) is None
    assert energy.counted_joules(CPU) is None
    assert not list(tmp_path.iterdir())


def test_a_counter_that_was_reset_records_nothing(driver: Driver, tmp_path: Path) -> None:
    driver.step = -90_000_000
    with energy.recorded(RunDirectory(tmp_path), GPU):
        pass
    assert not list(tmp_path.iterdir())


def test_energy_is_unknown_without_the_package(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.counted_joules(GPU) is None


def test_energy_is_that_of_all_starts_or_unknown() -> None:
    def joules(*events: dict[str, Any]) -> float | None:
        return Figures([], [], [{"time": 0.0, **event} for event in events]).joules

    started, resumed = {"event": "started", "world_size": 1}, {"event": "resumed", "world_size": 1}
    used = {"event": "energy", "joules": 3600}
    assert joules(started, used, resumed, used) == 7200
    assert joules(started, resumed, used) is None, "the first start was killed"
    assert joules({**started, "world_size": 2}, used) is None, "other ranks have other GPUs"
    assert joules(started) is None
