"""The benchmarks' own logic, as far as it can be held without a GPU: what is run, read, carried and reported."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from finetune.settings import load_config

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def gpu_check(benchmark: Any) -> ModuleType:
    return benchmark("gpu_check")


@pytest.fixture
def offline_wheels(benchmark: Any) -> ModuleType:
    return benchmark("offline_wheels")


# -- gpu_check ---------------------------------------------------------------------------------------------------------


def test_without_a_cuda_device_gpu_check_says_so_and_exits_4(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py", "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    assert done.stderr == "gpu-check: this machine has no CUDA device that torch can use; nothing was run\n"
    assert not output.exists()


def test_every_test_marked_gpu_is_where_gpu_check_looks() -> None:
    marked = [path for path in (ROOT / "tests").rglob("*.py") if re.search(r"pytest\.mark\.gpu\b", path.read_text())]
    elsewhere = [path for path in marked if ROOT / "tests" / "gpu" not in path.parents and path != Path(__file__)]
    assert not elsewhere
    assert len(marked) - (Path(__file__) in marked) == 2


@pytest.mark.parametrize("batch", [1, 4])
def test_the_7b_job_is_a_valid_config(gpu_check: ModuleType, tmp_path: Path, batch: int) -> None:
    config = load_config(gpu_check.CONFIG, gpu_check.overrides(batch, tmp_path / "rows.jsonl", tmp_path / "run"))
    assert (config.model.name, config.model.weights) == ("meta-llama/Llama-2-7b-hf", "random")
    assert config.quantization.kind == "nf4"
    assert config.training.batch_size == config.training.micro_batch == batch
    assert config.data.max_length == 2048
    assert config.memory.limit == 24 * 2**30


def test_rows_are_longer_than_the_cut(benchmark: Any, tmp_path: Path) -> None:
    from finetune.config import ModelSection
    from finetune.model.tokenizer import load_tokenizer

    harness = benchmark("harness")
    harness.write_long_rows(tmp_path / "rows.jsonl", rows=3, tokens=2048)
    texts = [line["text"] for line in harness.read_lines(tmp_path / "rows.jsonl")]
    assert len(set(texts)) == 3
    tokenizer = load_tokenizer(ModelSection())
    assert min(len(tokenizer(text)["input_ids"]) for text in texts) > 2048
    # A tokenizer with a large vocabulary takes a word for one token at best.
    assert min(len(text.split()) for text in texts) > 2048


def line(step: int, seconds: float, allocated: int) -> dict[str, Any]:
    """A metric line of a step over 2,048 tokens."""
    peak = {"allocated_bytes": allocated, "reserved_bytes": 2 * allocated, "device_bytes": 3 * allocated}
    return {
        "step": step,
        "loss": 10.0,
        "tokens": 2048,
        "tokens_per_second": 2048 / seconds,
        "padding_share": 0.0,
        "memory": {"forward": peak},
    }


def write_run(run: Path, lines: list[dict[str, Any]], event: dict[str, Any]) -> None:
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")


def test_a_jobs_speed_leaves_the_first_steps_out_and_its_peak_does_not(gpu_check: ModuleType, tmp_path: Path) -> None:
    lines = [line(step, 5.0 if step <= 3 else 0.5, 900 if step == 1 else 100) for step in range(1, 13)]
    load = {"load": {"allocated_bytes": 50, "reserved_bytes": 60, "device_bytes": 70}}
    write_run(tmp_path / "run", lines, {"event": "trained", "memory": load})
    found = gpu_check.figures(tmp_path / "run", 0, "")
    assert found["passed"]
    assert found["tokens_per_second"] == 4096.0
    assert found["step_seconds_median"] == 0.5
    assert found["steady_bytes"]["forward"]["allocated_bytes"] == 100
    assert found["peak_bytes"]["forward"]["allocated_bytes"] == 900
    assert found["peak_bytes"]["load"] == load["load"]


def test_running_out_of_memory_is_a_result(gpu_check: ModuleType, tmp_path: Path) -> None:
    memory = {"forward": {"allocated_bytes": 7, "reserved_bytes": 8, "device_bytes": 9}}
    write_run(tmp_path / "run", [line(1, 1.0, 5)], {"event": "out_of_memory", "memory": memory})
    errors = "a warning\nerror: out of memory: tried 2 GiB\nAllocator snapshot: /tmp/a/b/memory_snapshot.pickle\n"
    found = gpu_check.figures(tmp_path / "run", 6, errors)
    assert not found["passed"]
    assert found["out_of_memory"]
    assert found["message"] == "out of memory: tried 2 GiB\nAllocator snapshot: memory_snapshot.pickle"
    assert found["peak_bytes"]["forward"]["allocated_bytes"] == 7
    assert "tokens_per_second" not in found


def test_a_loss_that_is_no_number_does_not_pass(gpu_check: ModuleType, tmp_path: Path) -> None:
    lines = [line(step, 1.0, 5) for step in range(1, 13)]
    lines[-1]["loss"] = None
    write_run(tmp_path / "run", lines, {"event": "trained", "memory": {}})
    assert not gpu_check.figures(tmp_path / "run", 0, "")["passed"]


def test_the_next_part_runs_whatever_became_of_the_last(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def part(name: str, passed: bool) -> Any:
        return lambda: done.append(name) or {"passed": passed, "peak_bytes": {}}

    monkeypatch.setattr(gpu_check, "PARTS", {"one": part("one", False), "two": part("two", True)})
    monkeypatch.setattr(gpu_check.harness, "environment", dict)
    assert not gpu_check.check(["one", "two"], tmp_path / "result.json")
    assert done == ["one", "two"]
    parts = json.loads((tmp_path / "result.json").read_text())["parts"]
    assert [parts[name]["passed"] for name in done] == [False, True]


def test_the_junit_report_is_read_by_outcome(gpu_check: ModuleType) -> None:
    report = """<testsuites><testsuite><testcase classname="a" name="ok"/>
        <testcase classname="a" name="no"><failure message="assert 1 == 2">long</failure></testcase>
        <testcase classname="a" name="not here"><skipped message="no flex"/></testcase></testsuite></testsuites>"""
    assert gpu_check.read_junit(report) == {
        "passed_tests": 1,
        "failed": {"a::no": "assert 1 == 2"},
        "skipped": {"a::not here": "no flex"},
    }


def test_stored_parameters_are_counted_from_the_header(gpu_check: ModuleType, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    file = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, file, metadata={"format": "pt"})
    assert gpu_check.stored_parameters(file) == 22


def test_results_keep_no_absolute_path(benchmark: Any) -> None:
    text = "wrote /home/someone/runs/x/adapter, read configs/a.yaml and https://pytorch.org/memory_viz, 3 / 4"
    expected = "wrote adapter, read configs/a.yaml and https://pytorch.org/memory_viz, 3 / 4"
    assert benchmark("harness").without_paths(text) == expected


# -- the CPU benchmarks ------------------------------------------------------------------------------------------------


def test_the_overhead_is_the_median_of_the_pairs_ratios(benchmark: Any) -> None:
    overhead = benchmark("overhead")

    def pair(plain: float, ours: float) -> dict[str, dict[str, float]]:
        return {"plain": dict.fromkeys(overhead.MEASURES, plain), "finetune": dict.fromkeys(overhead.MEASURES, ours)}

    found = overhead.summary([pair(10, 11), pair(20, 20), pair(40, 42)])
    assert found["ratios"]["loop_seconds"] == {"median": 1.05, "least": 1.0, "largest": 1.1}
    assert found["medians"]["plain"]["loop_seconds"] == 20


def test_the_memory_benchmarks_arithmetic_counts_the_real_model(benchmark: Any) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    memory_cpu = benchmark("memory_cpu")
    model = memory_cpu.MODEL
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.config()))
    linear = [
        module for name, module in built.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    assert model.linear_parameters == sum(module.weight.numel() for module in linear)
    assert model.linear_rows == sum(module.out_features for module in linear)
    assert model.linear_parameters + model.kept_parameters == built.num_parameters() > 100_000_000
    bits = 8 * (memory_cpu.WEIGHTS[-1].weight_bytes(model) - 2 * model.kept_parameters) / model.linear_parameters
    assert bits == pytest.approx(4.127, abs=5e-4)


# -- offline_wheels ----------------------------------------------------------------------------------------------------

CONSTRAINTS = {name: Version("2.0") for name in ("app", "lib", "deep", "other")}


def requires(name: str) -> list[Requirement]:
    return [Requirement(text) for text in {"app": ["lib>=2", "torch>=2"], "lib": ["deep"]}.get(name, [])]


def test_a_freeze_is_read_with_and_without_versions(offline_wheels: ModuleType) -> None:
    text = (
        "# a comment\nTyping_Extensions==4.1\nbare\nlocal @ file:///x\n-e git+https://x\nmarked==1.0 ; sys_platform\n\n"
    )
    assert offline_wheels.read_versions(text) == {
        "typing-extensions": Version("4.1"),
        "bare": None,
        "local": None,
        "marked": Version("1.0"),
    }


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        pytest.param({}, ["app", "deep", "lib"], id="nothing there: all but torch"),
        pytest.param({"app": "1.0"}, [], id="what fits is not looked into"),
        pytest.param({"app": "0.9"}, ["app", "deep", "lib"], id="too old: replaced with what it requires"),
        pytest.param({"lib": "2.5"}, ["app"], id="a requirement that is there"),
        pytest.param({"lib": "1.5"}, ["app", "deep", "lib"], id="a requirement that is there and too old"),
        pytest.param({"lib": None}, ["app"], id="a version that is not known counts as fitting"),
        pytest.param({"deep": "0.1"}, ["app", "lib"], id="any version will do"),
    ],
)
def test_what_is_carried(offline_wheels: ModuleType, present: dict[str, str | None], expected: list[str]) -> None:
    versions = {name: version and Version(version) for name, version in present.items()}
    found = offline_wheels.carried([Requirement("app>=1")], versions, CONSTRAINTS, requires)
    assert found == dict.fromkeys(expected, Version("2.0"))


def test_a_package_accepted_by_one_and_refused_by_another_is_carried(offline_wheels: ModuleType) -> None:
    wanted = [Requirement("app"), Requirement("lib>=1")]
    found = offline_wheels.carried(wanted, {"lib": Version("1.0")}, CONSTRAINTS, requires)
    assert list(found) == ["app", "deep", "lib"]


def test_a_package_that_is_not_pinned_ends_it(offline_wheels: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"unpinned>=1 is needed"):
        offline_wheels.carried([Requirement("unpinned>=1")], {}, CONSTRAINTS, requires)


def test_every_runtime_requirement_is_pinned_and_installed_here(offline_wheels: ModuleType) -> None:
    constraints = offline_wheels.read_versions((ROOT / "constraints.txt").read_text())
    found = offline_wheels.carried(
        offline_wheels._runtime_requirements(), {}, constraints, offline_wheels._installed_requires("3.12")
    )
    assert {"bitsandbytes", "numpy", "peft", "pydantic-core", "transformers", "trl"} <= set(found)
    assert not {"torch", "pytest", "finetune"} & set(found)


def write_wheel(path: Path, files: dict[str, bytes]) -> None:
    """A wheel with a RECORD of all its files."""
    record = "example-1.dist-info/RECORD"
    lines = [f"{name},sha256={digest(content)},{len(content)}\n" for name, content in files.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "".join(lines) + f"{record},,\n")


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


FILES = {
    "bitsandbytes/__init__.py": b"",
    "bitsandbytes/libbitsandbytes_cpu.so": b"cpu",
    "bitsandbytes/libbitsandbytes_cuda130.so": b"cuda 13.0",
    "bitsandbytes/libbitsandbytes_cuda118.so": b"cuda 11.8",
    "bitsandbytes/libbitsandbytes_rocm72.so": b"rocm",
    "example-1.dist-info/METADATA": b"Name: example\n",
}


def test_a_stripped_wheel_is_still_a_valid_wheel(offline_wheels: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "example-1-py3-none-any.whl"
    write_wheel(wheel, FILES)
    offline_wheels.strip_cuda(wheel, "130")
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    record = {row[0]: row[1:] for row in csv.reader(io.StringIO(contents["example-1.dist-info/RECORD"].decode()))}
    kept = {name: content for name, content in FILES.items() if not re.search("cuda118|rocm", name)}
    assert set(record) == set(contents) == {*kept, "example-1.dist-info/RECORD"}
    for name, content in kept.items():
        assert contents[name] == content
        assert record[name] == [f"sha256={digest(content)}", str(len(content))]
    assert record["example-1.dist-info/RECORD"] == ["", ""]


def test_a_wheel_without_that_cuda_is_refused_and_left_alone(offline_wheels: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "example-1-py3-none-any.whl"
    write_wheel(wheel, FILES)
    before = wheel.read_bytes()
    with pytest.raises(SystemExit, match=r"no library for CUDA 999; it has cuda130, cuda118, rocm72"):
        offline_wheels.strip_cuda(wheel, "999")
    assert wheel.read_bytes() == before


def test_other_wheels_are_left_alone(offline_wheels: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "example-1-py3-none-any.whl"
    write_wheel(wheel, {"example/__init__.py": b""})
    before = wheel.read_bytes()
    offline_wheels.strip_cuda(wheel, "130")
    assert wheel.read_bytes() == before
