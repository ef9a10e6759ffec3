"""Every GPU test is in one slice, and a slice that breaks, hangs or comes too late ends itself alone."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gpu_check
import gpu_jobs
import gpu_slices
import harness
import pytest
from jobs import sampled

from finetune.choices import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("script", sampled(["gpu_check", "forecast_gpu"], "gpu_check"))
def test_without_a_cuda_device_it_says_so_and_exits_4(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", [script, "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 4
    assert (
        capsys.readouterr().err
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


def test_the_slices_are_expected_to_end_in_time() -> None:
    """All of them take 40 minutes at most, the most telling first."""
    assert sum(one.seconds for one in gpu_slices.SLICES.values()) <= 60 * gpu_check.MINUTES == 2400
    assert list(gpu_slices.SLICES)[:4] == ["environment", "tests-kernels", "beside-7b", "loads"]


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
    print("hangs is said", flush=True)
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
    for run, seconds in ((imports, 300), (dies, 300), (hangs, 4), (fails, 200), (fine, 300))
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


def shared(folder: Path) -> Path:
    """A cache of slices, in place of the one that later commands on a machine share."""
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.mark.long
def test_a_slice_that_breaks_ends_itself_alone(
    fakes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "result.json"
    assert not fakes.check(["imports", "dies", "hangs", "fails", "fine"], "cpu", output, cache=shared(tmp_path))
    slices = json.loads(output.read_text())["slices"]
    assert "no_such_library" in slices["imports"]["error"]
    assert slices["dies"]["error"] == "its process ended with -11"
    assert slices["hangs"]["error"] == "ended after 8 s"
    assert all(slices[name]["findings"] == {"before": {}} for name in ("imports", "dies", "hangs"))
    assert [slices[name]["passed"] for name in slices] == [False] * 4 + [True]
    assert slices["fine"]["findings"]["one"]["value"] == "nan"
    # What a slice that hung had started is ended too.
    child = Path("/proc") / slices["fine"]["findings"]["one"]["child"] / "cmdline"
    assert not child.is_file() or not child.read_bytes()
    kept = output.with_suffix("")
    files = {str(path.relative_to(kept / "fine")) for path in (kept / "fine").rglob("*") if path.is_file()}
    assert files == {"findings.json", "log.txt", "recording", "run/metrics.jsonl"}
    assert (kept / "fine" / "log.txt").read_text() == "fine is said\n"
    assert (kept / "hangs" / "log.txt").read_text() == "hangs is said\n", "what is ended leaves its text"
    assert sorted(path.name for path in output.parent.iterdir()) == ["result", "result.json"]
    assert "one: FAILED too much" in capsys.readouterr().out


def test_slices_without_time_left_are_reported_and_earlier_ones_stay(
    fakes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    cache = shared(tmp_path)
    assert fakes.check(["fine"], "cpu", output, cache=cache)
    assert not fakes.check(["fails", "fine"], "cpu", output, 250 / 60, cache)
    result = json.loads(output.read_text())
    assert result["left_out"] == ["fine"]
    assert list(result["slices"]) == ["fails"], "a result of another time would be taken for this one"
    printed = capsys.readouterr().out
    assert "fine left out" in printed
    assert "for what was left out: --slices fine\n" in printed
    assert fakes.check(["fine"], "cpu", output, cache=cache)
    assert set(json.loads(output.read_text())["slices"]) == {"fails", "fine"}
    assert (output.with_suffix("") / "fine" / "recording").is_file()


def test_a_summary_has_peaks_of_phases_with_different_measures() -> None:
    peaks = {"load": {"resident_bytes": 2**30}, "forward": {"allocated_bytes": 2**29, "resident_bytes": 2**31}}
    lines = gpu_check.summary("7b", {"passed": True, "findings": {"run": {"peak_bytes": peaks}}}).splitlines()
    assert lines[1].split() == ["peak,", "GiB", "resident", "allocated"]
    assert [line.split() for line in lines[3:]] == [
        ["run,", "load", "1.00", "0.00"],
        ["run,", "forward", "2.00", "0.50"],
    ]


def test_results_go_where_they_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.delenv("OUT", raising=False)
    assert gpu_check._options().output == ROOT / "benchmarks" / "results" / "gpu_check.json"
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check._options().output == tmp_path / "gpu_check.json"


def test_the_base_is_made_once_and_again_if_it_was_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def python(*arguments: object) -> harness.Finished:
        folder = Path(str(arguments[-1]))
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        made.append(folder)
        return harness.Finished(0, 1.0, 1.0, '{"parameters": 7}', "")

    monkeypatch.setattr(harness, "python", python)
    (tmp_path / "cache" / "base").mkdir(parents=True)  # of a command that was killed while it made it
    folder, facts = gpu_jobs.saved_weights(tmp_path / "cache", "a/base", "cpu")
    assert (facts["parameters"], facts["file_bytes"]) == (7, 7)
    assert gpu_jobs.saved_weights(tmp_path / "cache", "a/base", "cpu") == (folder, facts)
    assert made == [folder]
