"""The slices of gpu_check.py: what is asked of a card, each in a process of its own, the most telling first.

    python benchmarks/gpu_slices.py NAME --on cuda --answer FILE --scratch FOLDER --kept FOLDER

A slice is a generator of named findings. Each is written as soon as it is there, so that a slice which crashes, hangs
or runs out of time leaves what it found before. It has passed when it came to its end and no finding says otherwise.

With `--on cpu` a slice runs the same code with tiny models, and takes a CPU's measures in place of CUDA's. The
libraries are imported within the slices: an import that fails there ends one slice alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_sides
import harness
from gpu_jobs import SIZES, Findings, Work, answer, job, overrides, saved_weights


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
    """The machine, versions, every import, Triton's C compiler, bitsandbytes' library, and what doctor says."""
    yield "machine", _machine()
    yield "versions", _versions()
    yield "imports", _imports(work.on)
    yield "compiler", _compiler(work.scratch)
    import forecast_gpu

    yield "device", forecast_gpu.facts(work.device)
    yield "triton", _triton(work.device) if work.on == "cuda" else {"left_out": "Triton compiles for a GPU alone"}
    yield "bitsandbytes", _bitsandbytes(work.device)
    done = harness.python("-m", "finetune", "doctor")
    said = harness.without_paths(done.output + done.errors).splitlines()
    yield "doctor", {"exit_code": done.exit_code, "said": said}


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


def _compiler(scratch: Path) -> dict[str, Any]:
    """Whether an extension of Python can be built, as Triton builds its launcher: a C compiler and Python.h."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found: dict[str, Any] = {"compiler": compiler and Path(compiler).name, "python_header": header.is_file()}
    if not compiler:
        return {**found, "passed": False, "message": "no C compiler (CC, gcc, clang, cc)"}
    source, library = scratch / "stub.c", scratch / "stub.so"
    source.write_text("#include <Python.h>\nint stub(void) { return PY_MAJOR_VERSION; }\n")
    done = harness.run([*compiler.split(), "-shared", "-fPIC", f"-I{header.parent}", source, "-o", library])
    return {
        **found,
        "passed": done.exit_code == 0,
        "message": harness.last_line(done.errors) if done.exit_code else None,
    }


def _triton(device: Any) -> dict[str, Any]:
    """A kernel, compiled, launched and compared."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(source, target, count, block: tl.constexpr):
        places = tl.program_id(0) * block + tl.arange(0, block)
        inside = places < count
        tl.store(target + places, 2 * tl.load(source + places, mask=inside), mask=inside)

    source = torch.arange(1000, device=device, dtype=torch.float32)
    target = torch.zeros_like(source)
    started = time.perf_counter()
    double[(triton.cdiv(1000, 256),)](source, target, 1000, block=256)
    torch.cuda.synchronize()
    return {"passed": torch.equal(target, 2 * source), "seconds": round(time.perf_counter() - started, 2)}


def _bitsandbytes(device: Any) -> dict[str, Any]:
    """The compiled library, and one call of each kind: NF4 there and back, an int8 product, an 8-bit optimizer step."""
    import bitsandbytes as bnb
    import torch
    from bitsandbytes import functional
    from bitsandbytes.cextension import lib

    from finetune.model.structure import eight_bit

    weight = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    back = functional.dequantize_4bit(packed, state)
    nf4_error = float((back - weight).float().norm() / weight.float().norm())

    layer = bnb.nn.Linear8bitLt(256, 256, bias=False, has_fp16_weights=False)
    layer.weight = eight_bit.quantized(weight)
    eight_bit.weight_only(layer)
    inputs = torch.randn(8, 256, device=device, dtype=torch.bfloat16)
    product = layer(inputs).float()
    expected = inputs.float() @ weight.float().T
    int8_error = float((product - expected).norm() / expected.norm())

    trained = torch.nn.Parameter(torch.ones(512, 512, device=device))
    trained.grad = torch.ones_like(trained)
    bnb.optim.AdamW8bit([trained], lr=0.1).step()
    return {
        "library": type(lib).__name__,
        "compiled_with_cuda": bool(getattr(lib, "compiled_with_cuda", False)),
        "nf4_error": nf4_error,
        "int8_error": int8_error,
        "passed": nf4_error < 0.2 and int8_error < 0.02 and bool((trained < 1).all()),
    }


# -- the NaN of cuDNN's attention --------------------------------------------------------------------------------------

NAN_LOGIT = -120.0
"""Every score: each query's logsumexp is then below -88.7 = -ln(largest float32), pytorch/pytorch#196678."""
NAN_TOKENS = 192
"""64 modulo 128."""


def nan(work: Work) -> Findings:
    """cuDNN's backward pass with a mask, with and without what we do about it; then through steps of our trainer."""
    from finetune.runtime import libraries

    for tokens in (NAN_TOKENS, NAN_TOKENS + 64):
        for masked in (True, False):
            name = f"{tokens} tokens, {'a mask' if masked else 'causal without a mask'}"
            yield f"attention: {name}, as torch chooses", _attention_gradients(work, tokens, masked)
            with libraries.without_cudnn_attention():
                found = _attention_gradients(work, tokens, masked)
            yield f"attention: {name}, without cuDNN", {**found, "passed": found["not_finite"] == 0}
    found = _nan_step(work, masked=False, with_cudnn=False)
    yield "steps as we train", {**found, "passed": found["finite"] and found["masks"] == [False]}
    # A micro-batch of full rows, as in the step that is tried first, has no mask all the same.
    found = _nan_step(work, masked=True, with_cudnn=False)
    yield "steps with a mask, without cuDNN", {**found, "passed": found["finite"] and True in found["masks"]}
    # What a trainer that does neither would see. Not judged: a later cuDNN may have it mended.
    yield "steps with a mask, as torch chooses", _nan_step(work, masked=True, with_cudnn=True)


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


def _nan_step(work: Work, *, masked: bool, with_cudnn: bool) -> dict[str, Any]:
    """Two optimizer steps over uneven rows of a model with an attention head as in Qwen2.5: massive activations.

    The biases of queries and keys give every score about NAN_LOGIT, in the pair of places that rotates the least.
    """
    import forecast_gpu
    import measured_step
    import torch
    from torch.nn import functional

    from finetune.errors import FinetuneError
    from finetune.measure.monitor import Monitor, meter_for
    from finetune.model import build
    from finetune.model.probes import causality
    from finetune.runtime import libraries

    setting = forecast_gpu.Setting("nan", "qwen2", NAN_TOKENS, 2, 1)
    config, architecture = setting.resolved(), setting.build_architecture()
    dim = architecture.hidden_size // architecture.num_attention_heads
    seen: list[tuple[bool, int, float]] = []

    def load_base(*arguments: Any, **named: Any) -> Any:
        model = load(*arguments, **named)
        for name, module in model.named_modules():
            for projection, value in (("q_proj", 8.0), ("k_proj", NAN_LOGIT * math.sqrt(dim) / 8.0)):
                if name.endswith(projection):
                    module.bias.data.view(-1, dim)[:, dim // 2 - 1] = value
        return model

    def attend(query: Any, key: Any, *arguments: Any, **named: Any) -> Any:
        mask = arguments[1] if len(arguments) > 1 else named.get("attn_mask")
        if torch.is_grad_enabled():
            seen.append((mask is not None, query.shape[-2], _logsumexp(query, key)))
        return plain(query, key, *arguments, **named)

    load, plain = build.load_base, functional.scaled_dot_product_attention
    found: dict[str, Any] = {"finite": False}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "load_base", load_base))
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attend))
        stack.enter_context(mock.patch.object(causality, "needs_mask", lambda *_: masked))
        if with_cudnn:
            stack.enter_context(mock.patch.object(libraries, "without_cudnn_attention", contextlib.nullcontext))
        data = measured_step._data(config, architecture.vocab_size, setting.rows)
        try:
            steps, _ = measured_step.train(
                config, architecture, data, work.device, Monitor(meter_for(work.device.type))
            )
        except FinetuneError as error:
            found["message"] = str(error)[:500]
        else:
            norms = [line["grad_norm"] for line in steps]
            found |= {"losses": [line["loss"] for line in steps], "grad_norms": norms}
            found["finite"] = all(norm is not None and math.isfinite(norm) for norm in norms)
    masks, tokens, sums = ([sight[place] for sight in seen] for place in range(3))
    return {**found, "masks": sorted(set(masks)), "tokens": sorted(set(tokens)), "logsumexp": max(sums, default=None)}


# -- jobs --------------------------------------------------------------------------------------------------------------


def large(work: Work, batch: int) -> Findings:
    """The 7B job, capped at 24 GiB, with `batch` rows a step."""
    yield "run", _large_job(work, "run", batch)


def profile(work: Work) -> Findings:
    """The 7B job with one row a step, one step of it under the profiler: the kernels that take the most time."""
    found = _large_job(work, "run", 1, {"training.max_steps": 4, "memory.profile_steps": 1}, steps=4)
    yield "run", found
    (trace,) = (work.scratch / "run" / "profile").glob("*.json*")
    found = kernels(json.loads(trace.read_text(encoding="utf-8")), "kernel" if work.on == "cuda" else "cpu_op")
    yield "kernels", {**found, "trace_bytes": trace.stat().st_size, "passed": bool(found["by_name"])}


def expandable(work: Work) -> Findings:
    """The 7B job with four rows a step, under each of the allocator's settings: what is reserved."""
    from finetune.runtime import segments

    able = work.on == "cpu" or segments.supported(work.device.index)
    for value in (True, False) if able else (False,):
        variables = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{value}"}
        name = f"expandable-segments-{value}"
        yield name, _large_job(work, name, 4, {"training.max_steps": 4}, steps=4, variables=variables)


def _large_job(work: Work, name: str, batch: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Any:
    sizes = work.sizes
    rows = work.scratch / f"{name}.jsonl"
    harness.write_long_rows(rows, rows=batch * sizes.steps, tokens=sizes.tokens)
    return job(work, name, {**overrides(sizes, batch, rows), **(changes or {})}, **more)


def uneven(work: Work) -> Findings:
    """A 1B over rows of very different lengths, of which a batch takes four micro-batches."""
    yield "run", _uneven_job(work, "run", work.sizes.tokens, {"training.batch_size": 16, "training.micro_batch": 4})


def packed(work: Work) -> Findings:
    """A 1B over short rows, padded and packed: tokens per second and peaks beside each other."""
    for packing in (False, True):
        changes = {"training.batch_size": 32, "training.micro_batch": 8, "data.packing": str(packing).lower()}
        name = "packed" if packing else "padded"
        yield name, _uneven_job(work, name, work.sizes.small_tokens, changes)


def _uneven_job(work: Work, name: str, tokens: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    sizes = work.sizes
    rows = work.scratch / f"{name}.jsonl"
    harness.write_uneven_rows(rows, rows=changes["training.batch_size"] * sizes.steps, tokens=tokens)
    of_model = {"model.name": sizes.small, "data.max_length": tokens}
    return job(work, name, {**overrides(sizes, 1, rows), **of_model, **changes})


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

_LOAD = """
import json, resource, sys, time
import torch
from finetune.runtime import libraries
from finetune.config import ModelSection, QuantizationSection
from finetune.measure.monitor import Monitor, meter_for
from finetune.model import attention
from finetune.model.base import load_architecture, load_base
from finetune.runtime.device import this_device

libraries.quiet()
folder, kind = sys.argv[1:]
section, device = ModelSection(name=folder), this_device()
architecture = load_architecture(section)
implementation, _ = attention.choose("auto", architecture, device.type, "bf16")
monitor = Monitor(meter_for(device.type))
started = time.perf_counter()
with monitor.phase("load"):
    model = load_base(
        section, QuantizationSection(kind=kind), architecture, attention=implementation, dtype=torch.bfloat16,
        device=device,
    )
seconds = time.perf_counter() - started
kept = {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
types = {}
for weight in model.parameters():
    types[str(weight.dtype)] = types.get(str(weight.dtype), 0) + weight.nbytes
print(json.dumps({
    "seconds": round(seconds, 2), "peak_bytes": monitor.run["load"], "bytes_by_type": types,
    "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    **({"kept_bytes": kept} if device.type == "cuda" else {}),
}))
"""


def loads(work: Work) -> Findings:
    """A 1B in 16-bit files, loaded by from_pretrained in each storage, each in a process of its own."""
    folder, found = saved_weights(work, work.sizes.small)
    yield "saved", found
    for kind in ("nf4", "int8", "none"):
        yield kind, answer(harness.python("-c", _LOAD, folder, kind))


# -- the forecast ------------------------------------------------------------------------------------------------------

FORECAST_PARTS, FORECAST_SECONDS = 3, 220
"""Slices that share the settings, and after how many seconds each ends by itself."""


def forecast(work: Work, part: int) -> Findings:
    """How far `finetune plan` is off, over one part of the settings of forecast_gpu.py; it ends before its limit."""
    output = work.scratch / "forecast.json"
    chosen = ["--part", f"{part}/{FORECAST_PARTS}"] if work.on == "cuda" else ["--only", "tiny", "--on", "cpu"]
    done = harness.python(
        harness.ROOT / "benchmarks" / "forecast_gpu.py", *chosen, "--seconds", str(FORECAST_SECONDS),
        "--output", output, "--recordings", work.kept / "recordings",
    )  # fmt: skip
    print(done.output, done.errors, sep="\n", flush=True)
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
        extra={"FINETUNE_GPU_TESTS_ON": "cpu"} if work.on == "cpu" else None,
    )  # fmt: skip
    print(done.output, done.errors, sep="\n", flush=True)
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


# -- attention kernels -------------------------------------------------------------------------------------------------


def attention(work: Work) -> Findings:
    """One layer's attention, forward and backward, by each of SDPA's kernels: milliseconds, and bytes at its peak."""
    from torch.nn.attention import SDPBackend

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    backends["cudnn"] = SDPBackend.CUDNN_ATTENTION
    if work.on == "cpu":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    for tokens in work.sizes.attention_tokens:
        for name, backend in backends.items():
            for masked in (False, True):
                if masked and name == "flash":
                    continue  # the flash kernel of CUDA takes no mask
                case = f"{tokens} tokens, {name}, {'mask' if masked else 'causal'}"
                try:
                    found = _attention_layer(work, tokens, backend, masked)
                except RuntimeError as error:  # a kernel that this card or build lacks
                    found = {"passed": name != "flash", "message": harness.without_paths(str(error))[:500]}
                yield case, found


def _attention_layer(work: Work, tokens: int, backend: Any, masked: bool) -> dict[str, Any]:
    import torch
    from torch.nn import functional
    from torch.nn.attention import sdpa_kernel

    sizes, device, on_cuda = work.sizes, work.device, work.on == "cuda"
    shape = (1, sizes.heads, tokens, sizes.head_dim)
    query, key, value, back = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None] if masked else None
    for tensor in (query, key, value):
        tensor.requires_grad_()
    synchronize = torch.cuda.synchronize if on_cuda else (lambda: None)

    def step() -> float:
        for tensor in (query, key, value):
            tensor.grad = None
        synchronize()
        started = time.perf_counter()
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not masked)
        out.backward(back)
        synchronize()
        return time.perf_counter() - started

    step()
    found: dict[str, Any] = {}
    if on_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        found["peak_bytes_above_the_inputs"] = torch.cuda.max_memory_allocated() - before
    seconds = statistics.median(step() for _ in range(sizes.repeats))
    # Two products forward and five backward over the lower half of the scores.
    flops = 7 * tokens * tokens * sizes.head_dim * sizes.heads
    finite = all(bool(torch.isfinite(tensor.grad).all()) for tensor in (query, key, value))
    return {
        **found,
        "milliseconds": round(1e3 * seconds, 3),
        "flops_per_second": round(flops / seconds),
        "passed": finite,
    }


# -- the table ---------------------------------------------------------------------------------------------------------

# Of the tests of whole runs, those that need processes of their own are a slice of theirs.
_CAPS = "cap"
SLICES: dict[str, Slice] = {
    "environment": Slice(environment, 60),
    "nan": Slice(nan, 45),
    "7b-batch-4": Slice(partial(large, batch=4), 100),
    "beside-7b": Slice(partial(gpu_sides.beside, model="large", sides=("finetune", "trl")), 200),
    "beside-7b-peers": Slice(partial(gpu_sides.beside, model="large", sides=("unsloth", "llama-factory")), 200),
    "7b-batch-1": Slice(partial(large, batch=1), 60),
    "7b-profile": Slice(profile, 70),
    "uneven": Slice(uneven, 70),
    "loads": Slice(loads, 80),
    **{f"forecast-{part}": Slice(partial(forecast, part=part), 225) for part in range(1, FORECAST_PARTS + 1)},
    "tests-doctor": Slice(partial(tests, file="test_gpu_doctor.py", chosen=""), 20),
    "tests-kernels": Slice(partial(tests, file="test_gpu_kernels.py", chosen=""), 60),
    "tests-parts": Slice(partial(tests, file="test_gpu_parts.py", chosen=""), 60),
    "tests-oom-retry": Slice(partial(tests, file="test_gpu_oom_retry.py", chosen=""), 60),
    "tests-runs": Slice(partial(tests, file="test_gpu_runs.py", chosen=f"not {_CAPS}"), 150),
    "tests-caps": Slice(partial(tests, file="test_gpu_runs.py", chosen=_CAPS), 100),
    "tests-forecast": Slice(partial(tests, file="test_gpu_forecast.py", chosen=""), 60),
    "beside-1b": Slice(partial(gpu_sides.beside, model="small", sides=()), 220),
    "beside-7b-unfused": Slice(partial(gpu_sides.beside, model="large", sides=("finetune-unfused",)), 130),
    "beside-7b-kept": Slice(partial(gpu_sides.beside, model="large", sides=("finetune-kept", "trl-kept")), 200),
    "packed": Slice(packed, 120),
    "attention": Slice(attention, 45),
    "expandable": Slice(expandable, 120),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SLICES)
    parser.add_argument("--on", choices=SIZES, default="cuda")
    parser.add_argument("--answer", type=Path, required=True)
    for folder in ("scratch", "shared", "kept"):
        parser.add_argument(f"--{folder}", type=Path, default=Path(tempfile.gettempdir()) / f"gpu-slices-{folder}")
    options = parser.parse_args()
    work = Work(options.on, options.scratch, options.shared, options.kept)
    for folder in (work.scratch, work.shared, work.kept):
        folder.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if run(options.name, work, options.answer) else 1)


if __name__ == "__main__":
    main()
