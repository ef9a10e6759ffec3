"""The forecast of a job on this CUDA device holds against the job itself; `make gpu-check` compares 28 of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

OnCard = AbstractContextManager[None]

DEVICE = torch.device(os.environ.get("FINETUNE_GPU_TESTS_ON", "cuda"))
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def forecast_gpu() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("forecast_gpu")


@pytest.fixture(scope="module")
def measured(forecast_gpu: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A small job, forecast and trained in a process of its own, and the folder of its recording.

    On a card, earlier tests have left workspaces and cached segments in this one.
    """
    folder = tmp_path_factory.mktemp("recordings")
    if DEVICE.type != "cuda":
        return forecast_gpu.measure(forecast_gpu.TINY, DEVICE, folder, None), folder
    return forecast_gpu.measure_apart(forecast_gpu.SETTINGS[0], "cuda", folder, 150), folder


def test_a_small_job_is_forecast_and_trained(measured: tuple[dict[str, Any], Path]) -> None:
    found, _ = measured
    assert "error" not in found, found["error"]
    assert len(found["losses"]) == 2
    if torch.cuda.is_available():  # the meter that this script wraps counts no tensors on a CPU
        assert {"load", "forward", "backward", "optimizer"} <= {phase["phase"] for phase in found["phases"]}


def test_a_small_job_takes_what_was_forecast_and_reserves_on_paper_what_it_reserved(
    forecast_gpu: ModuleType, cuda: torch.device, on_card: OnCard, measured: tuple[dict[str, Any], Path]
) -> None:
    found, folder = measured
    with on_card:
        assert found["forecast_allocated_bytes"] == 0
    with on_card:
        assert abs(found["relative_errors"]["allocated"]) <= forecast_gpu.GOALS["allocated"], found
    with on_card:
        assert abs(found["relative_errors"]["reserved"]) <= forecast_gpu.GOALS["reserved"], found
    with on_card:
        assert "left_out" not in found["recording"], found["recording"]
    with on_card:
        assert abs(found["recording"]["reserved_error"]) <= forecast_gpu.GOALS["reserved"]
    with on_card:
        assert (folder / found["recording"]["file"]).is_file()
