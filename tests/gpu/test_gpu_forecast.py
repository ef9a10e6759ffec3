"""The forecast of a job on this CUDA device holds against the job itself; `make gpu-check` compares 28 of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def forecast_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("forecast_gpu")


def test_a_small_job_takes_what_was_forecast(forecast_gpu: ModuleType, device: torch.device, tmp_path: Path) -> None:
    # In a process of its own: here earlier tests have left workspaces, and cached segments.
    on_cuda = device.type == "cuda"
    setting = forecast_gpu.SETTINGS[0] if on_cuda else forecast_gpu.TINY
    found = forecast_gpu.measure_apart(setting, device.type, tmp_path, 300)
    assert "error" not in found, found["error"]
    assert len(found["losses"]) == 2
    assert {"load", "forward", "backward", "optimizer"} <= {phase["phase"] for phase in found["phases"]}
    if on_cuda:
        assert found["forecast_allocated_bytes"] == 0
        assert abs(found["relative_errors"]["allocated"]) <= forecast_gpu.GOALS["allocated"], found
        assert abs(found["relative_errors"]["reserved"]) <= forecast_gpu.GOALS["reserved"], found


def test_a_recorded_job_reserves_on_paper_what_it_reserved(
    forecast_gpu: ModuleType, cuda: torch.device, tmp_path: Path
) -> None:
    found = forecast_gpu.measure_apart(forecast_gpu.SETTINGS[0], "cuda", tmp_path, 300)
    assert "left_out" not in found["recording"], found["recording"]
    assert abs(found["recording"]["reserved_error"]) <= forecast_gpu.GOALS["reserved"]
    assert (tmp_path / found["recording"]["file"]).is_file()
