"""Sides of one job, each in its own environment, and their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_jobs
import gpu_sides
import gpu_slices
import pytest

from finetune.choices import load_config


def test_every_side_runs_in_one_slice() -> None:
    slices = (one for name, one in gpu_slices.SLICES.items() if name.startswith("beside"))
    assert sorted(side for one in slices for side in one.run.keywords["sides"]) == sorted(gpu_sides.SIDES)


def test_sides_are_compared_with_those_of_earlier_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_jobs, "saved_weights", lambda *_: (tmp_path, {}))
    figures = {"passed": True, "losses": [2.0], "tokens_per_second": 100.0}
    monkeypatch.setitem(gpu_sides.SIDES, "trl", lambda *_: figures)
    monkeypatch.setitem(gpu_sides.SIDES, "trl-kept", lambda *_: {**figures, "tokens_per_second": 150.0})
    for name, sides in {"beside-7b": ["trl"], "beside-7b-settings": ["trl-kept"]}.items():
        kept = tmp_path / name
        kept.mkdir()
        findings = dict(gpu_sides.beside(gpu_jobs.Work("cpu", kept, tmp_path, kept), sides))
        (kept / "findings.json").write_text(json.dumps({"findings": findings}))
    assert findings["beside"]["times_as_fast_as_trl"] == {"trl": 1.0, "trl-kept": 1.5}


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
