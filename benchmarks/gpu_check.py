"""One command for the day a GPU is there: what a card decides, in slices of at most four minutes.

    make gpu-check            or            python3 benchmarks/gpu_check.py [--slices NAME ...] [--seconds N]

It needs no network and no model files: architectures come from the catalog, weights are random, rows are made here.
The slices stand in gpu_slices.py, the most telling first. Each runs in a process of its own, so that its peaks are
clean and a crash ends it alone; running out of memory is a result. As each ends, three files are written: its findings
into benchmarks/results/gpu_check.json, beside those of slices that ran earlier; the small files of its runs and the
recordings of the allocator into gpu_check.tar.gz; and what it printed into gpu_check.log.

With `--seconds N` it ends in time, and says which slices were left out. Where one command may take ten minutes, give
it 560 and the next command the slices that were left out.

    python benchmarks/gpu_check.py --on cpu

tries every slice without a GPU, on tiny models, and writes where --output says (needed, so that nothing is mistaken
for a card's result).

Exit code: 0 all passed, 1 a slice failed or was left out, 4 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_jobs
import gpu_slices
import harness

NO_DEVICE = 4
"""Exit code of finetune for a machine that lacks something (see finetune.errors)."""

LIMIT_SECONDS = 240.0
"""No slice takes longer."""
LOG_BYTES = 200_000
"""What is kept of a slice's output: its end."""
FILE_BYTES, ARCHIVE_BYTES = 2**20, 15 * 2**20
"""The largest file taken from a slice's runs, and what all files may take together before they are compressed."""

_SMALL = frozenset({".json", ".jsonl", ".yaml", ".xml"})
_HAS_CUDA = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 4)"


def main() -> None:
    options = _options()
    sys.exit(run(options.slices, options.output, options.on, options.seconds))


def run(names: Sequence[str], output: Path, on: str = "cuda", seconds: float | None = None) -> int:
    """`check`, if there is a device; the exit code."""
    if on == "cuda" and (reason := obstacle()):
        print(f"gpu-check: {reason}; nothing was run", file=sys.stderr)
        return NO_DEVICE
    return 0 if check(names, on, output, seconds) else 1


def obstacle() -> str | None:
    """Why nothing can be checked on this machine, or None. Asked in a process that ends: it opens the device."""
    done = harness.python("-c", _HAS_CUDA)
    if done.exit_code == 0:
        return None
    if done.exit_code == NO_DEVICE:
        return "this machine has no CUDA device that torch can use"
    return (
        f"torch cannot be imported ({harness.without_paths((done.errors.strip().splitlines() or ['no output'])[-1])})"
    )


def check(names: Sequence[str], on: str, output: Path, seconds: float | None = None) -> bool:
    """Run the slices `names` in order, write after each, and tell whether all of them passed."""
    ends = time.monotonic() + (math.inf if seconds is None else seconds)
    result: dict[str, Any] = {"command": harness.command_line(), "on": on, "left_out": [], "slices": _earlier(output)}
    log = output.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    with _folders(output) as (work, kept):
        for name in names:
            left = ends - time.monotonic()
            if left < gpu_slices.SLICES[name].seconds:
                result["left_out"].append(name)
                result["slices"].pop(name, None)  # an earlier result would be taken for this run's
                print(f"gpu-check: {name} left out, {left:.0f} s were left", flush=True)
            else:
                print(f"gpu-check: {name} ...", flush=True)
                found, said = run_slice(name, on, work, kept, min(LIMIT_SECONDS, left))
                result["slices"][name] = found
                with open(log, "a", encoding="utf-8") as file:
                    file.write(f"==== {name} ====\n{said}\n")
                print(summary(name, found), flush=True)
            result["not_packed"] = pack(kept, output)
            harness.write_result(output, result)
    passed = not result["left_out"] and all(result["slices"][name]["passed"] for name in names)
    print(f"gpu-check: {'all passed' if passed else 'FAILED'}")
    return passed


def run_slice(name: str, on: str, work: Path, kept: Path, limit: float) -> tuple[dict[str, Any], str]:
    """One slice in a process group of its own, which is ended after `limit` seconds: what it found, and its output."""
    scratch, answer, output = work / name, work / f"{name}.json", work / f"{name}.log"
    command = [
        sys.executable, gpu_slices.__file__, name, "--on", on, "--answer", answer, "--scratch", scratch,
        "--shared", work / "shared", "--kept", kept / name,
    ]  # fmt: skip
    started = time.monotonic()
    with open(output, "wb") as file:
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
            # Its children too: a training process would go on to hold the card.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = output.read_bytes()[-LOG_BYTES:].decode("utf-8", "replace")
    found: dict[str, Any] = {"passed": False, "findings": {}}
    if answer.is_file():
        found = json.loads(answer.read_text(encoding="utf-8"))
    if exit_code is None:
        found |= {"passed": False, "error": f"ended after {limit:.0f} s"}
    elif exit_code and "error" not in found and not found["findings"]:
        found["error"] = f"its process ended with {exit_code}: {harness.without_paths(said.strip()[-1000:])}"
    elif exit_code not in (0, 1):
        found |= {"passed": False, "error": f"its process ended with {exit_code}"}
    found["seconds"] = round(time.monotonic() - started, 1)
    found["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    _take_small_files(scratch, kept / name)
    shutil.rmtree(scratch, ignore_errors=True)
    return found, said


def _variables(on: str, scratch: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH", "")]))
    found = {**os.environ, **harness.offline(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    # What is prepared from made-up rows is nobody's to keep.
    found["HF_DATASETS_CACHE"] = str(scratch / "datasets")
    if on == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


# -- what comes out ----------------------------------------------------------------------------------------------------


def _earlier(output: Path) -> dict[str, Any]:
    """The slices of an earlier run, each with the time at which it ran."""
    if not output.is_file():
        return {}
    return json.loads(output.read_text(encoding="utf-8")).get("slices", {})


@contextlib.contextmanager
def _folders(output: Path) -> Iterator[tuple[Path, Path]]:
    """A folder to work in and one whose files are packed, with those of an earlier archive; both go at the end."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        work, kept = Path(folder) / "work", Path(folder) / "kept"
        for made in (work, kept):
            made.mkdir()
        if (archive := _archive(output)).is_file():
            with tarfile.open(archive) as file:
                file.extractall(kept, filter="data")
        yield work, kept


def _archive(output: Path) -> Path:
    return output.with_suffix(".tar.gz")


def pack(kept: Path, output: Path) -> list[str]:
    """Write the archive beside `output`, small files first; returns what it had no room for."""
    files = sorted((path for path in kept.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    left, left_out = ARCHIVE_BYTES, []
    partly = output.with_suffix(".partly")
    with tarfile.open(partly, "w:gz") as archive:
        for path in files:
            name = str(path.relative_to(kept))
            left -= path.stat().st_size
            if left < 0:
                left_out.append(name)
            else:
                archive.add(path, name)
    partly.replace(_archive(output))
    return left_out


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
    rows = []
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
                rows.append((f"{key}, {phase}", *(harness.gib(size) for size in peak.values())))
                header = [measure.removesuffix("_bytes") for measure in peak]
    if rows:
        lines.append(harness.table(("peak, GiB", *header), rows))
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(gpu_slices.SLICES)
    parser.add_argument("--slices", nargs="+", choices=names, default=names, help="default: all, in this order")
    parser.add_argument("--seconds", type=float, help="end after so many seconds; by default when all have run")
    parser.add_argument("--on", choices=gpu_jobs.SIZES, default="cuda", help="cpu: try the slices without a GPU")
    parser.add_argument("--output", type=Path, help="the result; archive and log stand beside it")
    options = parser.parse_args()
    if options.output is None:
        if options.on == "cpu":
            parser.error("--on cpu needs --output")
        options.output = harness.RESULTS / "gpu_check.json"
    return options


if __name__ == "__main__":
    main()
