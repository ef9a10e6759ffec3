"""One command for the day a GPU is there: the tests marked `gpu`, a 7B job under a cap of 24 GiB, and the forecast.

    make gpu-check            or            python3 benchmarks/gpu_check.py

It needs no network and no model files: the 7B architecture comes from the catalog, its weights are random, its rows
are made here. Each part runs in a process of its own, so that its peaks are clean, and the next part runs whatever
became of the last; running out of memory is a result. Figures, peaks by phase and the environment go to
benchmarks/results/gpu_check.json after each part. The last part compares the forecast with 28 trained settings (see
forecast_gpu.py, whose result and recordings stand beside) and takes up to nine minutes: where a command may take ten,
give it one of its own, `--parts forecast`.

Exit code: 0 all passed, 1 a part failed, 4 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness

NO_DEVICE = 4
OUT_OF_MEMORY = 6
"""Exit codes of finetune (see finetune.errors)."""

CONFIG = harness.ROOT / "configs" / "llama7b_qlora.yaml"
TOKENS, STEPS, WARM_UP_STEPS = 2048, 12, 3
"""Tokens a row, optimizer steps, and how many of the first are left out of the speed and the steady peaks."""
BATCHES = (1, 4)
LIMIT = "24GiB"

_HAS_CUDA = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 4)"


def main() -> None:
    options = _options()
    if reason := obstacle():
        print(f"gpu-check: {reason}; nothing was run", file=sys.stderr)
        sys.exit(NO_DEVICE)
    sys.exit(0 if check(options.parts, options.output) else 1)


def obstacle() -> str | None:
    """Why nothing can be checked on this machine, or None. Asked in a process that ends: it opens the device."""
    done = harness.python("-c", _HAS_CUDA)
    if done.exit_code == 0:
        return None
    if done.exit_code == NO_DEVICE:
        return "this machine has no CUDA device that torch can use"
    return f"torch cannot be imported ({_last_line(done.errors)})"


def check(parts: list[str], output: Path) -> bool:
    """Run `parts` in order, write the result after each, and tell whether all passed."""
    result: dict[str, Any] = {
        "command": harness.command_line(),
        "environment": harness.environment(),
        "job": {
            "config": str(CONFIG.relative_to(harness.ROOT)),
            "weights": "random",
            "tokens": TOKENS,
            "steps": STEPS,
            "warm_up_steps": WARM_UP_STEPS,
            "limit": LIMIT,
        },
        "parts": {},
    }
    for name in parts:
        print(f"gpu-check: {name} ...", flush=True)
        found = result["parts"][name] = PARTS[name]()
        harness.write_result(output, result)
        print(_summary(name, found), flush=True)
    passed = all(found["passed"] for found in result["parts"].values())
    print(f"gpu-check: {'all passed' if passed else 'FAILED'}")
    return passed


# -- the tests ---------------------------------------------------------------------------------------------------------


def tests() -> dict[str, Any]:
    """The tests marked `gpu`: how many passed, were skipped or failed, and what the failures say."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        report = Path(scratch) / "report.xml"
        # The project's tests turn warnings into errors; those of another machine's torch are no failure of ours.
        done = harness.python(
            "-m", "pytest", "tests/gpu", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider",
            f"--junitxml={report}", f"--basetemp={scratch}/tmp",
        )  # fmt: skip
        print(done.output, flush=True)
        if not report.is_file():
            return {"passed": False, "exit_code": done.exit_code, "message": _last_line(done.errors or done.output)}
        counts = read_junit(report.read_text(encoding="utf-8"))
    # A skipped test has shown nothing, so a run in which all were skipped has not passed.
    return {"passed": done.exit_code == 0 and counts["passed_tests"] > 0, "exit_code": done.exit_code, **counts}


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


# -- the job -----------------------------------------------------------------------------------------------------------


def job(batch: int) -> dict[str, Any]:
    """Train the 7B job with `batch` rows of 2,048 tokens a step, and read its figures from the run directory."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        rows, run = Path(scratch) / "rows.jsonl", Path(scratch) / "run"
        harness.write_long_rows(rows, rows=batch * STEPS, tokens=TOKENS)
        done = harness.python("-m", "finetune", "train", CONFIG, *overrides(batch, rows, run))
        return {"exit_code": done.exit_code, **figures(run, done.exit_code, done.errors.replace(str(run), "RUN"))}


def overrides(batch: int, rows: Path, run: Path) -> list[str]:
    """What the job changes in the config, as `section.key=value`."""
    changes = {
        "model.weights": "random",
        "data.train": rows,
        "data.format": "text",
        "data.eval": "none",
        "data.max_length": TOKENS,
        "training.batch_size": batch,
        "training.micro_batch": batch,
        "training.max_steps": STEPS,
        "memory.limit": LIMIT,
        "output.dir": run,
    }
    return [f"{key}={value}" for key, value in changes.items()]


def figures(run: Path, exit_code: int, errors: str) -> dict[str, Any]:
    """What became of a job: tokens per second, seconds a step, losses, and peaks in bytes by phase.

    `steady_bytes` are the peaks of the steps after warm-up, `peak_bytes` those of the whole run with loading.
    """
    steps = harness.steps(run)
    losses = [line["loss"] for line in steps]
    finite = bool(losses) and all(loss is not None and math.isfinite(loss) for loss in losses)
    found: dict[str, Any] = {
        "passed": exit_code == 0 and len(steps) == STEPS and finite,
        "out_of_memory": exit_code == OUT_OF_MEMORY,
        "steps": len(steps),
        "losses": losses,
        "losses_are_finite": finite,
    }
    if exit_code:
        found["message"] = _error(errors)
    ended = harness.event(run, "trained") or harness.event(run, "out_of_memory")
    found["peak_bytes"] = harness.largest([ended.get("memory", {}), *(line["memory"] for line in steps)])
    if steady := steps[WARM_UP_STEPS:]:
        seconds = [line["tokens"] / line["tokens_per_second"] for line in steady]
        found |= {
            "tokens_per_second": round(sum(line["tokens"] for line in steady) / sum(seconds), 1),
            "step_seconds_median": round(statistics.median(seconds), 4),
            "step_seconds": [round(second, 4) for second in seconds],
            "padding_share": max(line["padding_share"] for line in steady),
            "steady_bytes": harness.largest([line["memory"] for line in steady]),
        }
    if (adapter := run / "adapter" / "adapter_model.safetensors").is_file():
        found["trained_parameters"] = stored_parameters(adapter)
    return found


def stored_parameters(safetensors: Path) -> int:
    """Number of parameters in a safetensors file, from its header (8 bytes of length, then JSON)."""
    with open(safetensors, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _error(errors: str) -> str:
    """The paragraph after `error:`, or the last line of a traceback, without the machine's paths."""
    _, marker, paragraph = f"\n{errors}".rpartition("\nerror: ")
    if not marker:
        return _last_line(errors)
    return harness.without_paths(paragraph.strip())[:2000]


def _last_line(text: str) -> str:
    return harness.without_paths((text.strip().splitlines() or ["no output"])[-1])


# -- the forecast ------------------------------------------------------------------------------------------------------


def forecast(output: Path = harness.RESULTS / "forecast_gpu.json") -> dict[str, Any]:
    """How far `finetune plan` is off, over the settings of forecast_gpu.py: its summary."""
    output.unlink(missing_ok=True)  # an older result is none of this card's
    done = harness.python(harness.ROOT / "benchmarks" / "forecast_gpu.py", "--output", output)
    print(done.output, flush=True)
    if not output.is_file():
        return {"passed": False, "exit_code": done.exit_code, "message": _last_line(done.errors or done.output)}
    found = json.loads(output.read_text(encoding="utf-8"))["summary"]
    return {**found, "passed": done.exit_code == 0 and found["passed"], "exit_code": done.exit_code}


# -- what comes out ----------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tests": tests,
    **{f"batch-{batch}": partial(job, batch) for batch in BATCHES},
    "forecast": forecast,
}


def _summary(name: str, found: dict[str, Any]) -> str:
    if name == "tests":
        failed = [f"\n  {test}: {message.splitlines()[0]}" for test, message in found.get("failed", {}).items()]
        return f"tests: {found.get('passed_tests', 0)} passed, {len(failed)} failed{''.join(failed)}"
    if name == "forecast" and "within" in found:
        within = ", ".join(
            f"{number} within {100 * found['goals'][measure]:.0f} % {measure}"
            for measure, number in found["within"].items()
        )
        rest = f"{len(found['failed'])} failed, {len(found['left_out'])} left out"
        return f"forecast: {found['measured']} of {found['settings']} settings measured, {within}; {rest}"
    lines = [f"{name}: {'passed' if found['passed'] else found.get('message', 'failed')}"]
    if "tokens_per_second" in found:
        lines.append(f"{found['tokens_per_second']:,} tokens/s, {found['step_seconds_median']:.3f} s a step")
    measures = ("allocated_bytes", "reserved_bytes", "device_bytes")
    rows = [
        (phase, *(harness.gib(peak[measure]) for measure in measures if measure in peak))
        for phase, peak in found.get("peak_bytes", {}).items()
    ]
    if rows:
        lines.append(harness.table(("peak, GiB", "allocated", "reserved", "device")[: len(rows[0])], rows))
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, in this order")
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "gpu_check.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
