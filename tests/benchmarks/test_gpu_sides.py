"""Sides of one job, each in its own environment, and their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_jobs
import gpu_sides
import gpu_slices
import pytest

from finetune.settings import load_config


def test_every_side_runs_both_models_in_one_slice() -> None:
    chosen: dict[str, list[str]] = {"large": [], "small": []}
    for name, one in gpu_slices.SLICES.items():
        if name.startswith("beside"):
            chosen[one.run.keywords["model"]] += one.run.keywords["sides"] or gpu_sides.SIDES
    assert sorted(chosen["large"]) == sorted(chosen["small"]) == sorted(gpu_sides.SIDES)


@pytest.mark.parametrize("side", ["finetune", "finetune-unfused", "finetune-kept"])
def test_our_sides_are_one_job_and_valid_configs(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {}
    monkeypatch.setattr(gpu_jobs, "job", lambda work, name, values: changes.update(values))
    work = gpu_jobs.Work("cuda", tmp_path, tmp_path, tmp_path)
    gpu_sides.SIDES[side](work, side, tmp_path / "weights", tmp_path / "rows.jsonl")
    config = load_config(gpu_jobs.CONFIG, [f"{key}={value}" for key, value in changes.items()])
    assert (config.quantization.kind, config.quantization.double, config.adapter.rank) == ("nf4", True, 16)
    assert (config.training.batch_size, config.training.rows, config.data.max_length) == (4, 4, 2048)
    assert (config.optimizer.kind, config.training.precision) == ("paged_adamw_8bit", "bf16")
    assert config.memory.limit is None
    assert config.kernels.fused == ("off" if side == "finetune-unfused" else "on")
    assert config.memory.checkpointing == ("none" if side == "finetune-kept" else "all")
