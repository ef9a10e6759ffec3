"""How long `finetune plan` takes as a whole process, imports included, and how much memory it takes itself.

    python benchmarks/forecast_speed.py

Llama-2-7B is to take at most 10 s and 70B at most 20 s on two cores, in less than 2 GiB. No weights, no network.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness

JOBS = {
    "meta-llama/Llama-2-7b-hf": (10.0, ["--gpu", "24GiB"]),
    "meta-llama/Llama-2-70b-hf": (20.0, ["--gpu", "A100 80GB"]),
}
"""By model: the seconds that are the goal, and the card."""
GOAL_BYTES = 2 * 2**30
CONFIG = harness.ROOT / "configs" / "llama7b_qlora.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "forecast_speed.json")
    options = parser.parse_args()
    jobs: dict[str, Any] = {}
    for model, (goal, card) in JOBS.items():
        runs = [_plan(model, card) for _ in range(options.rounds)]
        seconds = sorted(run[0] for run in runs)
        jobs[model] = {
            "seconds": [round(each, 2) for each in seconds],
            "median_seconds": round(seconds[len(seconds) // 2], 2),
            "goal_seconds": goal,
            "peak_resident_bytes": max(run[1] for run in runs),
            "goal_bytes": GOAL_BYTES,
        }
        print(f"{model}: {jobs[model]['seconds']} s, {harness.mib(jobs[model]['peak_resident_bytes'])} MiB", flush=True)
    result = {
        "command": harness.command_line(),
        "environment": harness.environment(),
        "imports_alone_seconds": round(_imports(), 2),
        "jobs": jobs,
        "passed": all(
            job["median_seconds"] <= job["goal_seconds"] and job["peak_resident_bytes"] <= GOAL_BYTES
            for job in jobs.values()
        ),
    }
    harness.write_result(options.output, result)
    sys.exit(0 if result["passed"] else 1)


def _plan(model: str, card: list[str]) -> tuple[float, int]:
    """(seconds, resident peak in bytes) of one plan."""
    command = [sys.executable, "-m", "finetune", "plan", str(CONFIG), f"model.name={model}", *card, "--json"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 6), f"plan ended with {code}"
    return seconds, _resident(usage)


def _resident(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * 1024  # Linux counts KiB (getrusage(2))


def _imports() -> float:
    """Seconds to import what a plan needs and do nothing."""
    code = (
        "from finetune import libraries\nwith libraries.importing_for_forecast():\n"
        "    from finetune import planning; from finetune.report.terminal import Terminal"
    )
    started = time.perf_counter()
    harness.succeeded(harness.python("-c", code))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
