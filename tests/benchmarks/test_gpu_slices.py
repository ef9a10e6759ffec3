"""What the slices of a GPU check run, read and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_jobs
import gpu_slices
import pytest


def line(step: int, seconds: float, allocated: int) -> dict[str, Any]:
    """A metric line of a step over 2,048 tokens."""
    peak = {"allocated_bytes": allocated, "reserved_bytes": 2 * allocated, "device_bytes": 3 * allocated}
    return {
        "step": step, "loss": 10.0, "tokens": 2048, "tokens_per_second": 2048 / seconds, "padding_share": 0.0,
        "memory": {"forward": peak},
    }  # fmt: skip


def write_run(run: Path, lines: list[dict[str, Any]], event: dict[str, Any]) -> None:
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")


def test_a_jobs_speed_leaves_the_first_steps_out_and_its_peak_does_not(tmp_path: Path) -> None:
    lines = [line(step, 5.0 if step <= 3 else 0.5, 900 if step == 1 else 100) for step in range(1, 13)]
    load = {"load": {"allocated_bytes": 50, "reserved_bytes": 60, "device_bytes": 70}}
    write_run(tmp_path / "run", lines, {"event": "trained", "memory": load})
    found = gpu_jobs.figures(tmp_path / "run", 0, "", 12, 3)
    assert found["passed"]
    assert found["tokens_per_second"] == 4096.0
    assert found["step_seconds_median"] == 0.5
    assert found["steady_bytes"]["forward"]["allocated_bytes"] == 100
    assert found["peak_bytes"]["forward"]["allocated_bytes"] == 900
    assert found["peak_bytes"]["load"] == load["load"]


def test_running_out_of_memory_is_a_result(tmp_path: Path) -> None:
    memory = {"forward": {"allocated_bytes": 7, "reserved_bytes": 8, "device_bytes": 9}}
    write_run(tmp_path / "run", [line(1, 1.0, 5)], {"event": "out_of_memory", "memory": memory})
    errors = "a warning\nerror: out of memory: tried 2 GiB\nAllocator snapshot: /tmp/a/b/memory_snapshot.pickle\n"
    found = gpu_jobs.figures(tmp_path / "run", 6, errors, 12, 3)
    assert not found["passed"]
    assert found["out_of_memory"]
    assert found["message"] == "out of memory: tried 2 GiB\nAllocator snapshot: memory_snapshot.pickle"
    assert found["peak_bytes"]["forward"]["allocated_bytes"] == 7
    assert "tokens_per_second" not in found


@pytest.mark.long
def test_slices_run_without_a_gpu(tmp_path: Path) -> None:
    """Those that take the least; `python benchmarks/gpu_check.py --on cpu` runs all of them."""
    slices = {}
    for name in ("nan", "7b-profile"):
        work = gpu_jobs.Work("cpu", *(tmp_path / name / folder for folder in ("scratch", "shared", "kept")))
        for folder in (work.scratch, work.kept):
            folder.mkdir(parents=True)
        passed = gpu_slices.run(name, work, tmp_path / f"{name}.json")
        slices[name] = json.loads((tmp_path / f"{name}.json").read_text())
        assert passed, slices[name]
    # The case of pytorch/pytorch#196678.
    assert all(one["logsumexp"] < -88.7 for one in slices["nan"]["findings"].values())
    kernels = slices["7b-profile"]["findings"]["kernels"]["by_name"]
    assert kernels[0]["microseconds"] >= kernels[-1]["microseconds"] > 0
