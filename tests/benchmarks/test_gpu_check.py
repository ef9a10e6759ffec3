"""Every GPU test is in one slice, and a slice that breaks, hangs or comes too late ends itself alone."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gpu_check
import gpu_jobs
import gpu_slices
import pytest

from finetune.settings import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpu_check", "forecast_gpu"])
def test_without_a_cuda_device_it_says_so_and_exits_4(script: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", "--output", str(output)],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert (
        done.stderr
        == f"{script.replace('_', '-')}: this machine has no CUDA device that torch can use; nothing was run\n"
    )
    assert not output.exists()


def test_every_test_marked_gpu_is_where_gpu_check_looks() -> None:
    marked = [path for path in (ROOT / "tests").rglob("*.py") if re.search(r"pytest\.mark\.gpu\b", path.read_text())]
    elsewhere = [path for path in marked if ROOT / "tests" / "gpu" not in path.parents and path != Path(__file__)]
    assert not elsewhere
    assert set(marked) - {Path(__file__)}, "the search finds none"


def test_every_gpu_test_is_in_one_slice() -> None:
    chosen: dict[str, list[str]] = {path.name: [] for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    for name, one in gpu_slices.SLICES.items():
        if name.startswith("tests-"):
            chosen[one.run.keywords["file"]].append(one.run.keywords["chosen"])
    assert chosen.pop("test_gpu_runs.py") == ["not cap", "cap"]
    assert all(words == [""] for words in chosen.values())


def test_every_slice_is_expected_to_end_within_its_limit() -> None:
    assert all(0 < one.seconds < gpu_check.LIMIT_SECONDS <= 240 for one in gpu_slices.SLICES.values())
    assert list(gpu_slices.SLICES)[:3] == ["environment", "nan", "7b-batch-4"]


@pytest.mark.parametrize("batch", [1, 4])
def test_the_7b_job_is_a_valid_config(tmp_path: Path, batch: int) -> None:
    changes = gpu_jobs.overrides(gpu_jobs.SIZES["cuda"], batch, tmp_path / "rows.jsonl")
    config = load_config(gpu_jobs.CONFIG, [f"{key}={value}" for key, value in changes.items()])
    assert (config.model.name, config.model.weights) == ("meta-llama/Llama-2-7b-hf", "random")
    assert config.quantization.kind == "nf4"
    assert config.training.batch_size == config.training.micro_batch == batch
    assert config.data.max_length == 2048
    assert config.memory.limit == 24 * 2**30


FAKES = f"""
import os, subprocess, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import gpu_slices

def imports(work):
    yield "before", {{}}
    import no_such_library

def dies(work):
    yield "before", {{}}
    os.kill(os.getpid(), 11)

def hangs(work):
    yield "before", {{}}
    child = subprocess.Popen(["sleep", "600"])
    (work.shared / "child").write_text(str(child.pid))
    child.wait()

def fails(work):
    yield "one", {{"passed": False, "message": "too much"}}

def fine(work):
    (work.scratch / "run").mkdir()
    (work.scratch / "run" / "metrics.jsonl").write_text("a line")
    (work.scratch / "run" / "weights.safetensors").write_text("weights")
    (work.kept / "recording").write_text("recorded")
    print("fine is said")
    child = work.shared / "child"
    yield "one", {{"value": float("nan"), "child": child.read_text() if child.is_file() else None}}

gpu_slices.SLICES = {{
    run.__name__: gpu_slices.Slice(run, seconds)
    for run, seconds in ((imports, 1), (dies, 1), (hangs, 1), (fails, 1), (fine, 30))
}}
if __name__ == "__main__":
    gpu_slices.main()
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """gpu_check with slices that break in every way, each still a process of its own."""
    (tmp_path / "fake_slices.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Loading the fakes puts their table into the real module, in this process too.
    monkeypatch.setattr(gpu_slices, "SLICES", gpu_slices.SLICES)
    monkeypatch.delitem(sys.modules, "fake_slices", raising=False)
    fakes = importlib.import_module("fake_slices")
    monkeypatch.setattr(gpu_check, "gpu_slices", SimpleNamespace(__file__=fakes.__file__, SLICES=gpu_slices.SLICES))
    return gpu_check


@pytest.mark.slow
def test_a_slice_that_breaks_ends_itself_alone(
    fakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fakes, "LIMIT_SECONDS", 4.0)
    output = tmp_path / "out" / "result.json"
    assert not fakes.check(["imports", "dies", "hangs", "fails", "fine"], "cpu", output)
    slices = json.loads(output.read_text())["slices"]
    assert "no_such_library" in slices["imports"]["error"]
    assert slices["dies"]["error"] == "its process ended with -11"
    assert slices["hangs"]["error"] == "ended after 4 s"
    assert all(slices[name]["findings"] == {"before": {}} for name in ("imports", "dies", "hangs"))
    assert [slices[name]["passed"] for name in slices] == [False] * 4 + [True]
    assert slices["fine"]["findings"]["one"]["value"] == "nan"
    # What a slice that hung had started is ended too.
    child = Path("/proc") / slices["fine"]["findings"]["one"]["child"] / "cmdline"
    assert not child.is_file() or not child.read_bytes()
    with tarfile.open(output.with_suffix(".tar.gz")) as archive:
        assert archive.getnames() == ["fine/run/metrics.jsonl", "fine/recording"]
    assert "==== fine ====\nfine is said\n" in output.with_suffix(".log").read_text()
    assert sorted(path.name for path in output.parent.iterdir()) == ["result.json", "result.log", "result.tar.gz"]
    assert "one: FAILED too much" in capsys.readouterr().out


def test_what_no_time_is_left_for_is_said_and_earlier_slices_stay(
    fakes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    assert fakes.check(["fine"], "cpu", output)
    assert not fakes.check(["fails", "fine"], "cpu", output, 20)
    result = json.loads(output.read_text())
    assert result["left_out"] == ["fine"]
    assert list(result["slices"]) == ["fails"], "a result of another time would be taken for this one"
    assert "fine left out" in capsys.readouterr().out
    assert fakes.check(["fine"], "cpu", output)
    assert set(json.loads(output.read_text())["slices"]) == {"fails", "fine"}
    with tarfile.open(output.with_suffix(".tar.gz")) as archive:
        assert "fine/recording" in archive.getnames()


def test_an_archive_has_its_limit(fakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for name, size in (("a", 10), ("b", 30), ("c", 20)):
        (kept / name).write_bytes(b"x" * size)
    monkeypatch.setattr(fakes, "ARCHIVE_BYTES", 40)
    assert fakes.pack(kept, tmp_path / "result.json") == ["b"]
    with tarfile.open(tmp_path / "result.tar.gz") as archive:
        assert archive.getnames() == ["a", "c"]
