"""How far the forecast of `finetune plan` is from what a real training step takes on the CUDA device that is here.

    python benchmarks/forecast_gpu.py [--only NAME] [--part I/N] [--seconds N]        (slices of `make gpu-check`)

The GPU's counterpart of forecast_cpu.py, from 100 million parameters to 7 billion, all with random weights: it needs
no network and no model files. Each setting is forecast and then really trained for two steps, in a process of its
own, and allocated (goal 1 %) and reserved bytes (goal 3 %) are compared at the peak and phase by phase. The allocator's
history of the smaller settings is kept in benchmarks/results/recordings/, so that the model of the allocator can be
held against a real card on machines that have none.

The sweep ends by itself after so many seconds: what no time is left for is left out, and the result says so. It is
written after each setting. While one setting trains, the next one's process imports what does not open the device.

    python benchmarks/forecast_gpu.py --on cpu --only tiny

tries the same path without a GPU: resident memory instead of the allocator's, one small setting, no recording.

Exit code: 0 all within the goals, 1 not, 4 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forecast_cpu
import harness

GOALS = {"allocated": 0.01, "reserved": 0.03}
"""Largest error of a peak, relative to what was measured."""
ENOUGH = 20
"""Settings that must have been measured for the matrix to count."""

SECONDS = 530
"""The whole sweep: less than ten minutes, which is what one command on a lent machine may take."""
_LEAST_LIMIT, _LIMIT_FACTOR = 90.0, 3.0
"""A setting's own limit in seconds, and so many times those that it is expected to take, where that is more."""

RECORDINGS = harness.RESULTS / "recordings"
RECORDING_BYTES = 2**20
"""A larger recording, compressed, does not belong into a repository."""
_HISTORY_ENTRIES = 4_000_000

NO_DEVICE = 4


# -- the settings ------------------------------------------------------------------------------------------------------

_110M, _120M = "llama-110m", "qwen2-120m"
_05B, _06B, _15B = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B"
_GEMMA, _1B, _7B = "google/gemma-3-1b-pt", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-2-7b-hf"

# Seconds of one setting on an H100, by its model: imports, forecast, building, two steps, export. Estimated.
_EXPECTED = {"llama": 12, _110M: 12, _120M: 12, _05B: 15, _06B: 16, _GEMMA: 17, _1B: 17, _15B: 18, _7B: 35}


@dataclass(frozen=True)
class Setting(forecast_cpu.Setting):
    """A job as in forecast_cpu.py, whose `architecture` may also be a name of the catalog.

    `recorded`: keep the allocator's history. `expandable`: expandable segments where a run takes them, else never.
    """

    recorded: bool = False
    expandable: bool = True

    @property
    def config(self) -> dict[str, Any]:
        model = {} if self.architecture in forecast_cpu.ARCHITECTURES else {"model.name": self.architecture}
        return {**model, **super().config}

    @property
    def seconds(self) -> float:
        """What it is expected to take on an H100."""
        return _EXPECTED[self.architecture]

    @property
    def file_name(self) -> str:
        """The name as that of a recording."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-") + ".json.gz"

    def build_architecture(self) -> Any:
        from finetune.model.source import catalog

        in_sweep = self.architecture in forecast_cpu.ARCHITECTURES
        return super().build_architecture() if in_sweep else catalog.config(self.architecture)


_S = Setting
_BF16 = "quantization.kind=none"
_INT8 = "quantization.kind=int8"
_NONE = "memory.checkpointing=none"
# In the order in which they are measured: what no time is left for is at the end, so each lever comes early once.
SETTINGS = (
    # The smallest, whose histories are recorded.
    _S("110m nf4", _110M, 512, 4, 1, recorded=True),
    _S("110m nf4 single, two micro-batches", _110M, 1024, 2, 2,
       "quantization.double=false optimizer.kind=adamw_8bit", recorded=True),
    _S("110m bf16, no checkpointing", _110M, 512, 8, 1,
       f"{_BF16} {_NONE} optimizer.kind=adamw_torch_fused", padded=False, recorded=True),
    _S("110m eager, four layers", _110M, 1024, 2, 1,
       "model.attention=eager memory.checkpointing=4 optimizer.kind=paged_adamw_32bit", recorded=True),
    _S("110m nf4, segments of fixed size", _110M, 512, 4, 1, recorded=True, expandable=False),
    _S("110m, whole", _110M, 1024, 2, 1,
       "adapter.kind=none quantization.kind=none optimizer.kind=adamw_torch_fused", recorded=True),
    _S("120m int8", _120M, 1024, 2, 1, f"{_INT8} optimizer.kind=adamw_8bit", recorded=True),
    # The job that the tool is for.
    _S("7B nf4", _7B, 2048),
    # A vocabulary of 152 thousand: the head and its loss decide.
    _S("0.5B nf4", _05B, 1024, 4),
    _S("0.5B nf4, loss in small tiles", _05B, 2048, 2, 1, "memory.loss_tokens=512"),
    _S("0.5B fp4, twelve layers", _05B, 1024, 2, 2,
       "quantization.kind=fp4 memory.checkpointing=12 adapter.rank=8 optimizer.kind=paged_adamw_32bit"),
    _S("0.5B bf16, rank 64, no checkpointing", _05B, 1024, 2, 1,
       f"{_BF16} {_NONE} adapter.rank=64 optimizer.kind=adamw_8bit"),
    _S("0.5B int8, evaluated", _05B, 2048, 1, 2, f"{_INT8} data.eval=rows"),
    # Below 1,536 tokens bitsandbytes may take a fused kernel, where the forecast is a bound (operator_costs.py).
    _S("0.5B nf4, one short row", _05B, 512, 1, 1, "optimizer.kind=adamw_torch_fused"),
    _S("0.6B nf4, unpadded", _06B, 2048, 4, 1, padded=False),
    _S("0.6B eager", _06B, 1024, 2, 1, "model.attention=eager"),
    _S("1B nf4, long row", _1B, 4096),
    _S("1B nf4, offloaded", _1B, 2048, 4, 1, "memory.offload=checkpoints"),
    _S("1B nf4, every second layer", _1B, 2048, 2, 2, "memory.checkpointing=every-2 adapter.rank=8"),
    _S("1B bf16, two targets", _1B, 1024, 4, 1, f"{_BF16} adapter.targets=[q_proj,v_proj] optimizer.kind=adamw_8bit"),
    _S("1B int8, no checkpointing", _1B, 2048, 1, 1, f"{_INT8} {_NONE} optimizer.kind=adamw_torch_fused"),
    _S("7B nf4, four rows", _7B, 2048, 4),
    _S("1.5B nf4, eight rows", _15B, 512, 8, 1, "adapter.dtype=bfloat16 adapter.rank=64"),
    _S("1.5B nf4, few trained tokens", _15B, 4096, 1, 1, "optimizer.kind=adamw_8bit", trained=256),
    _S("7B int8, half the layers", _7B, 1024, 2, 1, f"{_INT8} memory.checkpointing=16"),
    _S("gemma 1B nf4", _GEMMA, 1024, 2),
    _S("7B bf16, rank 64", _7B, 1024, 2, 1, f"{_BF16} adapter.rank=64 optimizer.kind=adamw_torch_fused"),
    _S("110m nf4, dropout", _110M, 2048, 2, 1, "adapter.dropout=0.05 optimizer.kind=adamw_torch_fused", recorded=True),
)  # fmt: skip

TINY = Setting("tiny", "llama", 128, 2, 1)
"""Not in the matrix, since 64 MiB of workspace are most of it: to try the path, also without a GPU."""


# -- one setting, in its own process -----------------------------------------------------------------------------------


def measure(setting: Setting, device: Any, recordings: Path, idle_bytes: int | None) -> dict[str, Any]:
    """Forecast `setting`, train it, and compare. To be asked once in a process, before anything was allocated.

    `idle_bytes`: what is in use on the card before any process of ours, so that the rest is this process's.
    """
    import measured_step
    import torch

    from finetune.forecast import devices
    from finetune.resolve.planner import Planner
    from finetune.runtime import libraries
    from finetune.runtime.memory_monitor import Monitor, meter_for

    libraries.quiet()
    config, architecture = setting.resolved(), setting.build_architecture()
    measured_step._check(config, setting.rows, setting.padded)
    data = measured_step._data(config, architecture.vocab_size, setting.rows)
    on_cuda = device.type == "cuda"
    card = devices.here(device, config.memory)
    started = time.perf_counter()
    forecast = Planner(config, architecture, card, data).forecast()
    found: dict[str, Any] = {"forecast_in_seconds": round(time.perf_counter() - started, 2)}
    gc.collect()
    if on_cuda:
        # A forecast is made of fake tensors; anything here would be a fault of it, and would spoil what follows.
        found["forecast_allocated_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    keeps = on_cuda and setting.recorded
    if keeps:
        torch.cuda.memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=_HISTORY_ENTRIES
        )
    started = time.perf_counter()
    meter = LastingMeter(meter_for(device.type))
    monitor = Monitor(meter)
    steps, attention = measured_step.train(config, architecture, data, device, monitor)
    meter.read()
    found["trained_in_seconds"] = round(time.perf_counter() - started, 2)
    measured_step.check_steps(config, architecture, setting.rows, steps)
    found |= {
        "attention": {"forecast": forecast.attention, "measured": attention},
        "losses": [line["loss"] for line in steps],
        "forecast": {
            "peak_allocated_bytes": forecast.peak_allocated_bytes,
            "peak_reserved_bytes": forecast.peak_reserved_bytes,
            "host_bytes": forecast.host_bytes,
            "categories": forecast.categories,
        },
        "measured": {f"peak_{measure}": size for measure, size in meter.peak.items()},
        "relative_errors": relative_errors(forecast, meter.peak),
        "phases": forecast.beside(monitor.peaks)["differences"],
        # The first step also compiles and loads kernels.
        "step_seconds": {
            "forecast": round(forecast.seconds, 4),
            "measured": round(harness.seconds(steps[-1]), 4),
        },
    }
    if on_cuda:
        free, total = torch.cuda.mem_get_info()
        found["measured"]["outside_bytes"] = total - free - torch.cuda.memory_reserved() - (idle_bytes or 0)
    if keeps:
        entries = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
        found["recording"] = record(setting, entries, meter.peak["allocated_bytes"], recordings)
    return found


class LastingMeter:
    """A meter of phases that also keeps the peaks of the whole run, with what lies between the phases."""

    def __init__(self, meter: Any) -> None:
        self._meter = meter
        self.peak: dict[str, int] = {}

    def reset(self) -> None:
        self.read()
        self._meter.reset()

    def read(self) -> dict[str, int]:
        found = self._meter.read()
        self.peak = {name: max(size, self.peak.get(name, 0)) for name, size in found.items()}
        return found


def relative_errors(forecast: Any, peak: Mapping[str, int]) -> dict[str, float]:
    """Forecast over measured, less 1, at the run's peak: `allocated` and `reserved`, or on a CPU `resident`."""
    predicted = {
        "allocated_bytes": forecast.peak_allocated_bytes,
        "reserved_bytes": forecast.peak_reserved_bytes,
        "resident_bytes": forecast.peak_allocated_bytes + forecast.device.outside_bytes,
    }
    return {
        measure.removesuffix("_bytes"): round(size / peak[measure] - 1, 5)
        for measure, size in predicted.items()
        if measure in peak
    }


def record(setting: Setting, entries: Sequence[Any], peak_allocated_bytes: int, folder: Path) -> dict[str, Any]:
    """Write the allocator's history as a recording, and replay it; `left_out` says why there is none."""
    from allocator_recording import Recording, replay

    try:
        recording = Recording.from_history(
            entries, expandable_segments=setting.expandable, peak_allocated_bytes=peak_allocated_bytes
        )
    except (ValueError, KeyError) as error:
        return {"entries": len(entries), "left_out": f"{type(error).__name__}: {error}"}
    played = replay(recording)
    packed = gzip.compress(recording.to_json().encode(), 9, mtime=0)
    found = {
        "events": len(recording.events),
        "compressed_bytes": len(packed),
        "modelled": played.modelled._asdict(),
        "recorded": played.recorded._asdict(),
        "reserved_error": round(played.modelled.reserved_bytes / played.recorded.reserved_bytes - 1, 5),
    }
    if len(packed) >= RECORDING_BYTES:
        return {**found, "left_out": f"{len(packed)} bytes are too many for a repository"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / setting.file_name).write_bytes(packed)
    return {**found, "file": setting.file_name}


def facts(device: Any) -> dict[str, Any]:
    """The device, and what is in use on it before any process of ours.

    What it takes besides tensors is measured by a run (`finetune.forecast.measured`).
    """
    import torch

    from finetune.runtime.environment import describe

    if device.type != "cuda":
        return {"name": "CPU", "torch": torch.__version__, "environment": describe(device)}
    driver, idle_bytes = _smi()
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name, "total_bytes": properties.total_memory,
        "capability": [properties.major, properties.minor], "torch": torch.__version__, "cuda": torch.version.cuda,
        "driver": driver, "idle_bytes": idle_bytes, "environment": describe(device),
    }  # fmt: skip


def _smi() -> tuple[str | None, int | None]:
    """The driver's version and the bytes in use on the first card, by nvidia-smi, which opens no context."""
    if not (tool := shutil.which("nvidia-smi")):
        return None, None
    done = harness.run([tool, "--query-gpu=driver_version,memory.used", "--format=csv,noheader,nounits"])
    driver, _, used = (done.output.splitlines() or [""])[0].partition(", ")
    return driver or None, int(used) * 2**20 if used.isdigit() else None


# -- processes ---------------------------------------------------------------------------------------------------------


class Process:
    """A fresh process of this file, which waits for a word after its imports and answers in a file.

    What it prints is in the file `log` as it comes.
    """

    def __init__(self, arguments: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="forecast-gpu-")
        self._answer = Path(self._scratch.name) / "answer.json"
        self._errors = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *arguments, "--answer", str(self._answer)],
                cwd=harness.ROOT,
                env=harness.variables(extra=extra),
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=subprocess.STDOUT,
            )

    def finish(self, limit: float) -> dict[str, Any]:
        try:
            self._process.communicate(b"go\n", timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": f"it took longer than {limit:.0f} s"}
        finally:
            self._process.kill()
            self._process.wait()
        if self._answer.is_file():
            return json.loads(self._answer.read_text(encoding="utf-8"))
        last = harness.last_line(self._errors.read_text(encoding="utf-8", errors="replace"))
        return {"error": f"the process ended with {self._process.returncode}: {last}"[-1000:]}

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        self._scratch.cleanup()


def process_of(setting: Setting, on: str, recordings: Path, idle_bytes: int | None) -> Process:
    """The process that measures `setting` on `on` (cuda or cpu)."""
    arguments = [
        "--worker", setting.name, "--on", on, "--recordings", str(recordings.resolve()), "--idle", str(idle_bytes or 0),
    ]  # fmt: skip
    extra = {} if setting.expandable else {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    return Process(arguments, (recordings / setting.file_name).with_suffix("").with_suffix(".txt"), extra)


def measure_apart(setting: Setting, on: str, recordings: Path, limit: float) -> dict[str, Any]:
    """One setting in a process of its own, begun and ended here."""
    process = process_of(setting, on, recordings, None)
    try:
        return process.finish(limit)
    finally:
        process.stop()


def work(name: str, on: str, answer: Path, recordings: Path, idle_bytes: int) -> None:
    """What a process does: import, wait for the word, and answer. `name` is a setting's, or `facts`."""
    import datasets  # noqa: F401  (what is imported here opens no device; bitsandbytes, imported later, does)
    import matplotlib.pyplot  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    if not sys.stdin.readline():
        return  # the parent is gone
    if on == "cuda" and not torch.cuda.is_available():
        answer.write_text(json.dumps({"error": "this machine has no CUDA device that torch can use"}))
        return
    from finetune.runtime.device import this_device

    device = this_device() if on == "cuda" else torch.device("cpu")  # settles what a run settles
    try:
        if name == "facts":
            found = facts(device)
        else:
            (setting,) = (one for one in (*SETTINGS, TINY) if one.name == name)
            found = measure(setting, device, recordings, idle_bytes)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        traceback.print_exc()
        place = f"{Path(last.filename).name}:{last.lineno}"
        found = {"error": harness.without_paths(f"{type(error).__name__}: {error} ({place})")[-1000:]}
        if isinstance(error, torch.OutOfMemoryError):
            found["out_of_memory"] = True
    answer.write_text(json.dumps(found), encoding="utf-8")


# -- the sweep ---------------------------------------------------------------------------------------------------------


class Deadline:
    """So many seconds from now on, shared out among the settings."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def limit(self, seconds: float) -> float:
        """How long something that should take `seconds` may take."""
        return min(self.left, max(_LEAST_LIMIT, _LIMIT_FACTOR * seconds))


def sweep(
    settings: Sequence[Setting],
    deadline: Deadline,
    start: Callable[[Setting], Process],
    tell: Callable[[dict[str, dict[str, Any]]], None],
) -> None:
    """Measure the settings one after the other; `tell` is given all rows so far after each.

    Each one's process is started while the one before still works. A setting for which no time is left is left out:
    a later and smaller one may still be measured.
    """
    rows: dict[str, dict[str, Any]] = {}
    waiting: Process | None = None
    try:
        for number, setting in enumerate(settings):
            worker, waiting = waiting, None
            try:
                if deadline.left >= setting.seconds:
                    worker = worker or start(setting)
                    if number + 1 < len(settings):
                        waiting = start(settings[number + 1])
                    rows[setting.name] = _row(setting, worker, deadline)
                else:
                    rows[setting.name] = _description(setting) | {"left_out": f"{deadline.left:.0f} s were left"}
            finally:
                if worker is not None:
                    worker.stop()
            tell(rows)
    finally:
        if waiting is not None:
            waiting.stop()


def _row(setting: Setting, worker: Process, deadline: Deadline) -> dict[str, Any]:
    started = time.monotonic()
    found = worker.finish(deadline.limit(setting.seconds))
    return _description(setting) | {"seconds": round(time.monotonic() - started, 1)} | found


def _description(setting: Setting) -> dict[str, Any]:
    return {
        "model": setting.architecture,
        "config": setting.config,
        "padded": setting.padded and setting.micro_batch > 1,
        "expandable_segments": setting.expandable,
    }


def summary(rows: Mapping[str, Mapping[str, Any]], wanted: int) -> dict[str, Any]:
    """How many of the settings were measured, how many are within the goals, and the worst of each measure.

    `passed`: none failed, all that were measured are within both goals, and they are enough, of `wanted` settings.
    """
    errors = {name: row["relative_errors"] for name, row in rows.items() if "relative_errors" in row}
    found: dict[str, Any] = {
        "settings": wanted,
        "measured": len(errors),
        "failed": [name for name, row in rows.items() if "error" in row],
        "left_out": [name for name, row in rows.items() if "left_out" in row],
        "goals": GOALS,
        "within": {},
        "worst": {},
        "median_absolute_error": {},
    }
    for measure, goal in GOALS.items():
        of_measure = {name: error[measure] for name, error in errors.items() if measure in error}
        found["within"][measure] = sum(abs(error) <= goal for error in of_measure.values())
        if of_measure:
            worst = max(of_measure, key=lambda name: abs(of_measure[name]))
            found["worst"][measure] = {"setting": worst, "error": of_measure[worst]}
            found["median_absolute_error"][measure] = statistics.median(map(abs, of_measure.values()))
    enough = len(errors) >= min(ENOUGH, wanted)
    found["passed"] = enough and not found["failed"] and set(found["within"].values()) == {len(errors)}
    found["recordings"] = [row["recording"]["file"] for row in rows.values() if "file" in row.get("recording", {})]
    # Paged states are managed memory, which is on the card and not in the allocator either.
    outside = [
        row["measured"]["outside_bytes"]
        for row in rows.values()
        if "outside_bytes" in row.get("measured", {}) and "paged" not in row["config"].get("optimizer.kind", "paged")
    ]
    if outside:
        found["largest_outside_bytes"] = max(outside)
    return found


# -- what comes out ----------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    if options.worker:
        work(options.worker, options.on, options.answer, options.recordings, options.idle)
        return
    chosen = forecast_cpu.named(options.only, (*SETTINGS, TINY)) if options.only else part_of(SETTINGS, options.part)
    deadline = Deadline(options.seconds)
    result: dict[str, Any] = {
        "command": harness.command_line(),
        "device": _facts(options.on, deadline, options.recordings),
    }

    def tell(rows: dict[str, dict[str, Any]]) -> None:
        result["summary"], result["settings"] = summary(rows, len(chosen)), rows
        harness.write_result(options.output, result)
        name = list(rows)[-1]
        print(f"{name}: {_said(rows[name])}", flush=True)

    idle_bytes = result["device"].get("idle_bytes")
    sweep(chosen, deadline, lambda setting: process_of(setting, options.on, options.recordings, idle_bytes), tell)
    print(json.dumps(result["summary"], indent=2))
    sys.exit(0 if result["summary"]["passed"] else 1)


def part_of(settings: Sequence[Setting], part: str) -> list[Setting]:
    """Part I of N of `settings`, given as `I/N`: those that follow each other, of about the same expected seconds."""
    number, of = map(int, part.split("/"))
    share = sum(setting.seconds for setting in settings) / of
    before = 0.0
    found = []
    for setting in settings:
        if min(int((before + setting.seconds / 2) / share), of - 1) == number - 1:
            found.append(setting)
        before += setting.seconds
    return found


def _facts(on: str, deadline: Deadline, recordings: Path) -> dict[str, Any]:
    """The device's facts, or the end where there is no device."""
    process = Process(["--worker", "facts", "--on", on], recordings / "facts.txt")
    try:
        found = process.finish(deadline.limit(_LEAST_LIMIT))
    finally:
        process.stop()
    if "no CUDA device" in found.get("error", ""):
        print(f"forecast-gpu: {found['error']}; nothing was run", file=sys.stderr)
        sys.exit(NO_DEVICE)
    return found


def _said(row: Mapping[str, Any]) -> str:
    if "left_out" in row:
        return f"left out, {row['left_out']}"
    if "error" in row:
        return f"FAILED: {row['error'][:300]}"
    errors = ", ".join(f"{measure} {100 * error:+.2f} %" for measure, error in row["relative_errors"].items())
    return f"{errors} in {row['seconds']} s"


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__, "forecast_gpu.json")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this setting (may be repeated)")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="only part I of N of the settings")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"end after so many seconds (default {SECONDS})")
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda", help="cpu: try the path without a GPU")
    parser.add_argument(
        "--recordings", type=Path, default=RECORDINGS, help="folder for the allocator's histories, and what is printed"
    )
    for hidden, kind in (("--worker", str), ("--answer", Path), ("--idle", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
