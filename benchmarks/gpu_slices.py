"""The slices of gpu_check.py: what a GPU is asked, each in a process of its own, the most telling first.

A slice is a generator of named findings. Each is written as soon as it is there, so that a slice which crashes, hangs
or runs out of time leaves what it found before. It has passed when it came to its end and no finding says otherwise.

On a CPU a slice runs the same code with tiny models, and takes a CPU's measures in place of CUDA's. The libraries are
imported within the slices: an import that fails there ends one slice alone.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_sides
import harness
from gpu_jobs import Findings, Work, job, overrides, saved_weights


@dataclass(frozen=True)
class Slice:
    """`run` yields findings; `seconds` is what it is expected to take on an H100 (estimated; none has run yet)."""

    run: Callable[[Work], Findings]
    seconds: int


# -- the machine -------------------------------------------------------------------------------------------------------

_PACKAGES = (
    "torch", "triton", "bitsandbytes", "transformers", "peft", "trl", "accelerate", "datasets", "huggingface_hub",
    "tokenizers", "safetensors", "numpy",
)  # fmt: skip
_SMI_FIELDS = "name,driver_version,compute_cap,memory.total,memory.used,clocks.max.sm,clocks.max.mem,power.limit"


def environment(work: Work) -> Findings:
    """The machine, versions, every import, what is measured of a card, and what doctor says."""
    yield "machine", _machine()
    yield "versions", _versions()
    yield "imports", _imports(work.on)
    import forecast_gpu

    yield "device", forecast_gpu.facts(work.device)
    yield "measured", _measured(work.device)
    done = harness.python("-m", "finetune", "doctor", log=work.kept / "doctor")
    yield "doctor", {"exit_code": done.exit_code, "said": harness.without_paths(done.output + done.errors).splitlines()}


def _measured(device: Any) -> dict[str, Any]:
    """What a run measures of a card, beside which `device` has its data sheet's."""
    from finetune.forecast import measured

    notes: list[str] = []
    measured.rates(device, notes.append)
    measured.context(device, notes.append)
    return {**asdict(measured.known(device)), "notes": notes}


def _machine() -> dict[str, Any]:
    import platform

    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()}
    if tool := shutil.which("nvidia-smi"):
        done = harness.run([tool, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"])
        values = [value.strip() for value in (done.output.splitlines() or [""])[0].split(",")]
        found["nvidia-smi"] = dict(zip(_SMI_FIELDS.split(","), values, strict=False)) or done.errors
    return found


def _versions() -> dict[str, Any]:
    from importlib import metadata

    found: dict[str, Any] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _imports(on: str) -> dict[str, Any]:
    """Every library and every module of finetune, one by one: seconds, and what failed."""
    import importlib
    import pkgutil

    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}

    def take(name: str) -> Any:
        started = time.perf_counter()
        try:
            module = importlib.import_module(name)
        except Exception as error:
            failed[name] = harness.without_paths(f"{type(error).__name__}: {error}")[:1000]
            return None
        seconds[name] = round(time.perf_counter() - started, 2)
        return module

    for name in _PACKAGES:
        if name != "triton" or on == "cuda":
            take(name)
    if package := take("finetune"):
        for found in pkgutil.walk_packages(package.__path__, "finetune."):
            if not found.name.endswith("__main__"):
                take(found.name)
    return {"passed": not failed, "failed": failed, "seconds": {k: s for k, s in seconds.items() if s >= 0.1}}


# -- the NaN of cuDNN's attention --------------------------------------------------------------------------------------

NAN_LOGIT = -120.0
"""Every score: each query's logsumexp is then below -88.7 = -ln(largest float32), pytorch/pytorch#196678."""
NAN_TOKENS = 192
"""64 modulo 128."""


def nan(work: Work) -> Findings:
    """The gradients of attention with a mask, by cuDNN's backward pass and without it, as we train."""
    from finetune.runtime import libraries

    for tokens in (NAN_TOKENS, NAN_TOKENS + 64):
        for masked in (True, False):
            name = f"{tokens} tokens, {'a mask' if masked else 'causal without a mask'}"
            yield f"{name}, as torch chooses", _attention_gradients(work, tokens, masked)
            with libraries.without_cudnn_attention():
                found = _attention_gradients(work, tokens, masked)
            yield f"{name}, without cuDNN", {**found, "passed": found["not_finite"] == 0}


def _attention_gradients(work: Work, tokens: int, masked: bool) -> dict[str, Any]:
    """One head's attention whose scores are all about NAN_LOGIT: entries of the gradients that are not finite."""
    import torch
    from torch.nn import functional

    dim = 64
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, tokens, dim, device=work.device, dtype=torch.bfloat16) for _ in range(3))
    query, key = query * 0.1, key * 0.1
    query[..., 0], key[..., 0] = 1.0, NAN_LOGIT * math.sqrt(dim)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=work.device).tril()[None, None] if masked else None
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not masked)
    out.backward(torch.randn_like(out))
    each = {
        name: int((~torch.isfinite(tensor.grad)).sum())
        for name, tensor in (("query", query), ("key", key), ("value", value))
    }
    return {"not_finite": sum(each.values()), "of": each, "logsumexp": _logsumexp(query, key)}


def _logsumexp(query: Any, key: Any) -> float:
    """The largest over the first head's queries, of causal scores in float32."""
    import torch

    query, key = (each[:1, :1].detach().float() for each in (query, key))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return round(float(scores.masked_fill(hidden, -math.inf).logsumexp(-1).max()), 2)


# -- jobs --------------------------------------------------------------------------------------------------------------


def profile(work: Work) -> Findings:
    """The 7B job with one row a step, capped at 24 GiB, one step of it under the profiler: the kernels by time."""
    sizes, rows = work.sizes, work.scratch / "rows.jsonl"
    harness.write_long_rows(rows, rows=4, tokens=sizes.tokens)
    changes = {**overrides(sizes, 1, rows), "training.max_steps": 4, "memory.profile_steps": 1}
    yield "run", job(work, "run", changes, steps=4)
    (trace,) = (work.scratch / "run" / "profile").glob("*.json*")
    found = kernels(json.loads(trace.read_text(encoding="utf-8")), "kernel" if work.on == "cuda" else "cpu_op")
    yield "kernels", {**found, "trace_bytes": trace.stat().st_size, "passed": bool(found["by_name"])}


def uneven(work: Work) -> Findings:
    """A 1B over rows of very different lengths: short ones padded and packed, and long ones in four micro-batches."""
    sizes = work.sizes
    for name, tokens, batch, rows, packing in (
        ("padded", sizes.small_tokens, 32, 8, "false"),
        ("packed", sizes.small_tokens, 32, 8, "true"),
        ("long", sizes.tokens, 16, 4, "false"),
    ):
        file = work.scratch / f"{name}.jsonl"
        harness.write_uneven_rows(file, rows=batch * sizes.steps, tokens=tokens)
        changes = {
            "model.name": sizes.small, "data.max_length": tokens, "data.packing": packing,
            "training.batch_size": batch, "training.micro_batch": rows,
        }  # fmt: skip
        yield name, job(work, name, {**overrides(sizes, 1, file), **changes})


def kernels(trace: Mapping[str, Any], category: str, most: int = 40) -> dict[str, Any]:
    """Calls and microseconds of the events of `category` in a profiler's trace, by name, those with the most first.

    `busy_share` is the time in which one of them ran, of the time from the first to the last.
    """
    events = [event for event in trace["traceEvents"] if event.get("cat") == category and event.get("ph") == "X"]
    calls: dict[str, int] = {}
    microseconds: dict[str, float] = {}
    for event in events:
        name = event["name"]
        calls[name] = calls.get(name, 0) + 1
        microseconds[name] = microseconds.get(name, 0.0) + event["dur"]
    first = sorted(microseconds, key=lambda name: -microseconds[name])
    busy, until, start = 0.0, -math.inf, min((event["ts"] for event in events), default=0.0)
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return {
        "category": category,
        "microseconds": round(sum(microseconds.values())),
        "busy_share": round(busy / (until - start), 4) if events and until > start else None,
        "by_name": [
            {"name": name[:300], "calls": calls[name], "microseconds": round(microseconds[name])}
            for name in first[:most]
        ],
    }


# -- weights in files --------------------------------------------------------------------------------------------------


def loads(work: Work) -> Findings:
    """A 1B in 16-bit files, loaded in each storage and trained for a step: peaks by phase, loading among them."""
    folder, found = saved_weights(work.shared, work.sizes.small, work.on)
    yield "saved", found
    rows = work.scratch / "rows.jsonl"
    harness.write_long_rows(rows, rows=2, tokens=work.sizes.small_tokens)
    for kind in ("nf4", "int8", "none"):
        changes = {
            **overrides(work.sizes, 1, rows), "model.name": folder, "model.weights": "pretrained",
            "data.max_length": work.sizes.small_tokens, "quantization.kind": kind, "training.max_steps": 1,
        }  # fmt: skip
        yield kind, job(work, kind, changes, steps=1)


# -- the forecast ------------------------------------------------------------------------------------------------------

FORECAST_PARTS, FORECAST_SECONDS = 3, 185
"""Slices that share the settings, and after how many seconds each ends by itself."""


def forecast(work: Work, part: int) -> Findings:
    """How far `finetune plan` is off, over one part of the settings of forecast_gpu.py; it ends before its limit."""
    output = work.kept / "forecast.json"  # which is written after each setting
    chosen = ["--part", f"{part}/{FORECAST_PARTS}"] if work.on == "cuda" else ["--only", "tiny", "--on", "cpu"]
    done = harness.python(
        harness.ROOT / "benchmarks" / "forecast_gpu.py", *chosen, "--seconds", str(FORECAST_SECONDS),
        "--output", output, "--recordings", work.kept / "recordings", log=work.kept / "forecast",
    )  # fmt: skip
    if not output.is_file():
        yield "summary", {"passed": False, "exit_code": done.exit_code, "message": harness.last_line(done.errors)}
        return
    found = json.loads(output.read_text(encoding="utf-8"))
    # Without a card nothing is within a goal for the allocator: there it is enough that it was measured.
    passed = found["summary"]["passed"] if work.on == "cuda" else found["summary"]["measured"] == 1
    yield "summary", {**found["summary"], "passed": passed}
    yield "settings", found["settings"]


# -- the tests ---------------------------------------------------------------------------------------------------------


def tests(work: Work, file: str, chosen: str) -> Findings:
    """The tests marked `gpu` of one file: how many passed, were skipped or failed, and what the failures say."""
    report = work.scratch / "report.xml"
    # The project's tests turn warnings into errors; those of another machine's torch are no failure of ours.
    done = harness.python(
        "-m", "pytest", f"tests/gpu/{file}", "-m", "gpu", "-k", chosen, "-v", "-W", "default", "-p", "no:cacheprovider",
        "--durations=0", f"--junitxml={report}", f"--basetemp={work.scratch}/tmp",
        extra={"FINETUNE_GPU_TESTS_ON": "cpu"} if work.on == "cpu" else None, log=work.kept / "pytest",
    )  # fmt: skip
    if not report.is_file():
        yield (
            "tests",
            {"passed": False, "exit_code": done.exit_code, "message": harness.last_line(done.errors or done.output)},
        )
        return
    counts = read_junit(report.read_text(encoding="utf-8"))
    # A skipped test has shown nothing, so on a card a run in which all were skipped has not passed.
    shown = counts["passed_tests"] > 0 or work.on == "cpu"
    yield "tests", {"passed": done.exit_code == 0 and shown, "exit_code": done.exit_code, **counts}


def read_junit(text: str) -> dict[str, Any]:
    """Counts, failures and skips of a JUnit report written by pytest."""
    cases = list(ElementTree.fromstring(text).iter("testcase"))
    failed = {_name(case): _message(case, "failure", "error") for case in cases}
    skipped = {_name(case): _message(case, "skipped") for case in cases}
    failed = {name: message for name, message in failed.items() if message is not None}
    skipped = {name: message for name, message in skipped.items() if message is not None}
    return {"passed_tests": len(cases) - len(failed) - len(skipped), "failed": failed, "skipped": skipped}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _message(case: ElementTree.Element, *kinds: str) -> str | None:
    for kind in kinds:
        if (found := case.find(kind)) is not None:
            return harness.without_paths(found.get("message", "").strip())[:500]
    return None


# -- the table ---------------------------------------------------------------------------------------------------------

# Of the tests of whole runs, those that need processes of their own are a slice of theirs.
_CAPS = "cap"
SLICES: dict[str, Slice] = {
    "environment": Slice(environment, 60),
    "tests-kernels": Slice(partial(tests, file="test_gpu_kernels.py", chosen=""), 60),
    "beside-7b": Slice(partial(gpu_sides.beside, sides=("finetune", "trl")), 200),
    "loads": Slice(loads, 80),
    **{f"forecast-{part}": Slice(partial(forecast, part=part), 190) for part in range(1, FORECAST_PARTS + 1)},
    "tests-doctor": Slice(partial(tests, file="test_gpu_doctor.py", chosen=""), 20),
    "tests-parts": Slice(partial(tests, file="test_gpu_parts.py", chosen=""), 60),
    "tests-oom-retry": Slice(partial(tests, file="test_gpu_oom_retry.py", chosen=""), 60),
    "tests-runs": Slice(partial(tests, file="test_gpu_runs.py", chosen=f"not {_CAPS}"), 150),
    "tests-caps": Slice(partial(tests, file="test_gpu_runs.py", chosen=_CAPS), 100),
    "tests-forecast": Slice(partial(tests, file="test_gpu_forecast.py", chosen=""), 60),
    "beside-7b-settings": Slice(
        partial(gpu_sides.beside, sides=("finetune-unfused", "finetune-kept", "trl-kept")), 200
    ),
    "7b-profile": Slice(profile, 70),
    "nan": Slice(nan, 30),
    "uneven": Slice(uneven, 110),
    "beside-7b-peers": Slice(partial(gpu_sides.beside, sides=("unsloth", "llama-factory")), 200),
}


def run(name: str, work: Work, answer: Path) -> bool:
    """Run one slice, write its findings to `answer` as they come, and tell whether it passed."""
    findings: dict[str, Any] = {}
    found: dict[str, Any] = {"passed": False, "findings": findings}
    try:
        for key, value in SLICES[name].run(work):
            findings[key] = value
            _write(answer, found)
        found["passed"] = bool(findings) and all(value.get("passed", True) for value in findings.values())
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        found["error"] = harness.without_paths(f"{type(error).__name__}: {error} ({place})")[:2000]
    _write(answer, found)
    return found["passed"]


def _write(answer: Path, found: Mapping[str, Any]) -> None:
    """NaN and infinity, which JSON lacks, become text."""
    partly = answer.with_suffix(".partly")
    partly.write_text(json.dumps(_plain(found), allow_nan=False), encoding="utf-8")
    partly.replace(answer)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value


def main() -> None:
    """`NAME ON ANSWER SCRATCH SHARED KEPT`, as gpu_check.py starts it."""
    name, on, *paths = sys.argv[1:]
    answer, *folders = map(Path, paths)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if run(name, Work(on, *folders), answer) else 1)


if __name__ == "__main__":
    main()
