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


def test_a_peer_runs_in_its_own_environment_or_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = gpu_jobs.Work("cpu", tmp_path, tmp_path, tmp_path)
    missing = gpu_sides.script("plain_qlora.py", "no_such_module")
    assert missing(work, "peer", tmp_path, tmp_path) == {"left_out": "not installed"}
    interpreter = tmp_path / "python"
    interpreter.write_text("""#!/bin/sh\n[ "$1" = -c ] || echo "{\\"said\\": \\"$*\\"}"\n""")
    interpreter.chmod(0o755)
    monkeypatch.setenv("LLAMA_FACTORY_PYTHON", str(interpreter))
    found = gpu_sides.SIDES["llama-factory"](work, "llama-factory", tmp_path, tmp_path / "rows.jsonl")
    assert found["passed"]
    assert "llama_factory_qlora.py" in found["said"]
    assert "--batch-size=4 --max-length=64 --max-steps=3 --warm-up-steps=1" in found["said"]


def test_speeds_are_multiples_of_trls_and_losses_are_compared() -> None:
    def side(speed: float, *losses: float) -> dict[str, Any]:
        return {"passed": True, "tokens_per_second": speed, "losses": list(losses)}

    found = {
        "finetune": side(300.0, 4.0, 2.0),
        "trl": side(200.0, 4.0, 2.01),
        "unsloth": {"left_out": "not installed"},
        "trl-kept": {"passed": False, "message": "out of memory"},
    }
    compared = gpu_sides.compared(found)
    assert compared["times_as_fast_as_trl"] == {"finetune": 1.5, "trl": 1.0}
    assert compared["losses_apart"] == {"finetune": 0.0, "trl": pytest.approx(0.005)}
    assert compared["passed"]
    assert not gpu_sides.compared({**found, "llama-factory": side(1.0, 4.0, 2.03)})["passed"]
