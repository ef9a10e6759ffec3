"""One command for the day a GPU is there: what only a GPU decides, in slices that end within 40 minutes together.

    make gpu-check            or            python3 benchmarks/gpu_check.py [--slices NAME ...] [--minutes N]

It needs no network and no model files: architectures come from the catalog, weights are random, rows are made here.
The slices are in gpu_slices.py, the most telling first. Each runs in a process of its own, so that its peaks are clean
and a crash ends it alone; running out of memory is a result. Everything is written as it comes, into $OUT if that is
set, else into benchmarks/results/: gpu_check.json has the findings, beside those of slices that ran earlier, and the
folder gpu_check has for each slice what it and its jobs print, the small files of its runs and the recordings of the
allocator.

With `--minutes N` it ends in time; a slice that is expected to take longer than what is left is left out. Where one
command may take ten minutes, give it 9.5 and the next command the slices that were left out. The base of the 7B jobs is
made once, in a cache folder (`--cache`) that later commands on the same machine take it from.

    python benchmarks/gpu_check.py --on cpu

tries every slice without a GPU, on tiny models, and writes where --output says (needed, so that nothing is mistaken
for a GPU's result).

Exit code: 0 all passed, 1 a slice failed or was left out, 4 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_jobs
import gpu_slices
import harness

NO_DEVICE = 4
"""Exit code of finetune for a machine that lacks something (see finetune.errors)."""

MINUTES = 40.0
"""What all slices are expected to take together, at most."""
OVERTIME = 2.0
"""A slice is ended after this multiple of the seconds it is expected to take."""
CACHE = Path(tempfile.gettempdir()) / "finetune-gpu-check"
FILE_BYTES = 2**20
"""The largest file taken from a slice's runs."""

_SMALL = frozenset({".json", ".jsonl", ".yaml", ".xml"})
_HAS_CUDA = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 4)"


def main() -> None:
    options = _options()
    sys.exit(run(options.slices, options.output, options.on, options.minutes, options.cache))


def run(names: Sequence[str], output: Path, on: str = "cuda", minutes: float = MINUTES, cache: Path = CACHE) -> int:
    """`check`, if there is a device; the exit code."""
    if on == "cuda" and (reason := obstacle()):
        print(f"gpu-check: {reason}; nothing was run", file=sys.stderr)
        return NO_DEVICE
    return 0 if check(names, on, output, minutes, cache) else 1


def obstacle() -> str | None:
    """Why nothing can be checked on this machine, or None. Asked in a process that ends: it opens the device."""
    done = harness.python("-c", _HAS_CUDA)
    if done.exit_code == 0:
        return None
    if done.exit_code == NO_DEVICE:
        return "this machine has no CUDA device that torch can use"
    return f"torch cannot be imported ({harness.last_line(done.errors)})"


def check(names: Sequence[str], on: str, output: Path, minutes: float = MINUTES, cache: Path = CACHE) -> bool:
    """Run the slices `names` in order, write after each, and return True if all of them passed."""
    ends = time.monotonic() + 60 * minutes
    earlier = harness.saved(output, "slices")  # each with the time at which it ran
    result: dict[str, Any] = {"command": harness.command_line(), "on": on, "left_out": [], "slices": earlier}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        for name in names:
            left, expected = ends - time.monotonic(), gpu_slices.SLICES[name].seconds
            result["slices"].pop(name, None)  # an earlier result would be taken for this run's
            if left < expected:
                result["left_out"].append(name)
                print(f"gpu-check: {name} left out, {left:.0f} s were left", flush=True)
            else:
                print(f"gpu-check: {name} ...", flush=True)
                kept = output.with_suffix("") / name
                found = run_slice(name, on, Path(work) / name, cache, kept, min(OVERTIME * expected, left))
                result["slices"][name] = found
                print(summary(name, found), flush=True)
            harness.write_result(output, result)
    if result["left_out"]:
        print(f"gpu-check: for what was left out: --slices {' '.join(result['left_out'])}")
    passed = not result["left_out"] and all(result["slices"][name]["passed"] for name in names)
    print(f"gpu-check: {'all passed' if passed else 'FAILED'}")
    return passed


def run_slice(name: str, on: str, scratch: Path, cache: Path, kept: Path, limit: float) -> dict[str, Any]:
    """The findings of one slice, in a process group of its own, which is ended after `limit` seconds.

    What it prints goes to log.txt in `kept` as it comes.
    """
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    answer, log = kept / "findings.json", kept / "log.txt"
    command = [sys.executable, gpu_slices.__file__, name, on, answer, scratch, cache, kept]
    started = time.monotonic()
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=harness.ROOT,
            env=_variables(on, scratch),
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            exit_code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            # Its children too: a training process would go on to hold the GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = {"passed": False, "findings": {}}
    if answer.is_file():
        found = json.loads(answer.read_text(encoding="utf-8"))
    if exit_code is None:
        found |= {"passed": False, "error": f"ended after {limit:.0f} s"}
    elif exit_code and "error" not in found and not found["findings"]:
        said = log.read_text(encoding="utf-8", errors="replace").strip()[-1000:]
        found["error"] = f"its process ended with {exit_code}: {harness.without_paths(said)}"
    elif exit_code not in (0, 1):
        found |= {"passed": False, "error": f"its process ended with {exit_code}"}
    found["seconds"] = round(time.monotonic() - started, 1)
    found["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    _take_small_files(scratch, kept)
    shutil.rmtree(scratch, ignore_errors=True)
    return found


def _variables(on: str, scratch: Path) -> dict[str, str]:
    # What is prepared from made-up rows is nobody's to keep.
    extra = {"PYTHONUNBUFFERED": "1", "HF_DATASETS_CACHE": str(scratch / "datasets")}
    return harness.variables(extra=extra | ({"CUDA_VISIBLE_DEVICES": ""} if on == "cpu" else {}))


# -- what comes out ----------------------------------------------------------------------------------------------------


def _take_small_files(scratch: Path, into: Path) -> None:
    """Configs, metrics, events, forecasts and reports of the runs; not the data, weights and pictures."""
    for path in sorted(scratch.rglob("*")):
        parts = path.relative_to(scratch).parts
        wanted = path.suffix in _SMALL and path.is_file() and not {"datasets", "checkpoints", "adapter"} & set(parts)
        if wanted and len(parts) > 1 and path.stat().st_size <= FILE_BYTES:
            target = into.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def summary(name: str, found: Mapping[str, Any]) -> str:
    """A slice for a person: whether it passed, what failed or was left out, speeds, and peaks by phase in GiB."""
    failed = [key for key, value in found["findings"].items() if not value.get("passed", True)]
    lines = [f"{name}: {'passed' if found['passed'] else 'FAILED'} in {found.get('seconds', 0):.0f} s"]
    if "error" in found:
        lines.append(f"  {found['error']}")
    rows: dict[str, Mapping[str, int]] = {}
    for key, value in found["findings"].items():
        if key in failed:
            said = value.get("message") or value.get("failed") or ""
            lines.append(f"  {key}: FAILED {said}"[:1000])
        if "left_out" in value:
            lines.append(f"  {key}: {value['left_out']}")
        if "tokens_per_second" in value:
            speed = f"{value['tokens_per_second']:,} tokens/s, {value['step_seconds_median']:.3f} s a step"
            lines.append(f"  {key}: {speed}")
        for phase, peak in value.get("peak_bytes", {}).items():
            if isinstance(peak, Mapping):
                rows[f"{key}, {phase}"] = peak
    if rows:
        measures = dict.fromkeys(measure for peak in rows.values() for measure in peak)
        header = ("peak, GiB", *(measure.removesuffix("_bytes") for measure in measures))
        sizes = ((name, *(harness.gib(peak.get(each, 0)) for each in measures)) for name, peak in rows.items())
        lines.append(harness.table(header, list(sizes)))
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    names = list(gpu_slices.SLICES)
    parser.add_argument("--slices", nargs="+", choices=names, default=names, help="default: all, in this order")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"end after so many (default {MINUTES:.0f})")
    parser.add_argument("--on", choices=gpu_jobs.SIZES, default="cuda", help="cpu: try the slices without a GPU")
    parser.add_argument("--output", type=Path, help="the result; the folder of the same name is beside it")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder for the base that is made (default {CACHE})")
    options = parser.parse_args()
    if options.output is None:
        if options.on == "cpu":
            parser.error("--on cpu needs --output")
        options.output = Path(os.environ.get("OUT") or harness.RESULTS) / "gpu_check.json"
    return options


if __name__ == "__main__":
    main()
