"""How long `finetune plan` takes as a whole process, to its first line and to its end, and how much memory.

    python benchmarks/forecast_speed.py

With everything recomputed Llama-2-7B is to take at most 6 s and 70B at most 20 s on two idle cores, in less than 2 GiB,
and each is to say within 1 s what it plans; a plan that chooses what is recomputed makes several forecasts. DPO on 7B,
with the pass that scores its reference, is to take no more than 6 s. CPU seconds (user and system) stand beside: where
they are far below, the cores were not idle. No weights, no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import harness

JOBS = {
    "meta-llama/Llama-2-7b-hf": (6.0, "llama7b_qlora", ["memory.checkpointing=all", "--gpu", "24GiB"]),
    "meta-llama/Llama-2-70b-hf": (20.0, "llama7b_qlora", ["memory.checkpointing=all", "--gpu", "A100 80GB"]),
    "meta-llama/Llama-2-7b-hf, chosen": (30.0, "llama7b_qlora", ["--gpu", "24GiB"]),
    "meta-llama/Llama-2-7b-chat-hf, dpo": (6.0, "llama7b_dpo", ["--gpu", "RTX 4090"]),
}
"""By model: the seconds that are the goal, a file of configs/, and what is asked."""
FIRST_LINE_SECONDS = 1.0
GOAL_BYTES = 2 * 2**30


def main() -> None:
    parser = harness.parser(__doc__, "forecast_speed.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", action="append", choices=JOBS, help="only this job (may be repeated)")
    options = parser.parse_args()
    # Some jobs are measured again beside what stands in the file of the others.
    jobs: dict[str, Any] = harness.saved(options.output, "jobs") if options.job else {}
    for job in options.job or JOBS:
        goal, config, asked = JOBS[job]
        rounds = [_twice(config, job.partition(",")[0], asked) for _ in range(options.rounds)]
        runs = [first for first, _ in rounds]
        jobs[job] = {
            **_seconds("seconds", [run.seconds for run in runs]),
            "goal_seconds": goal,
            **_seconds("again_seconds", [again.seconds for _, again in rounds]),
            **_seconds("first_line_seconds", [run.first_line_seconds for run in runs]),
            "goal_first_line_seconds": FIRST_LINE_SECONDS,
            **_seconds("cpu_seconds", [run.cpu_seconds for run in runs]),
            "peak_resident_bytes": max(run.peak_resident_bytes for run in runs),
            "goal_bytes": GOAL_BYTES,
        }
        print(
            f"{job}: {jobs[job]['seconds']} s, again {jobs[job]['again_seconds']} s, "
            f"first line {jobs[job]['first_line_seconds']} s, {harness.mib(jobs[job]['peak_resident_bytes'])} MiB",
            flush=True,
        )
    result = {
        "imports_alone_seconds": round(_imports(), 2),
        "jobs": jobs,
        "passed": all(
            job["median_seconds"] <= job["goal_seconds"]
            and job["median_first_line_seconds"] <= FIRST_LINE_SECONDS
            and job["peak_resident_bytes"] <= GOAL_BYTES
            for job in jobs.values()
        ),
    }
    harness.save(options.output, result)
    sys.exit(0 if result["passed"] else 1)


def _seconds(name: str, values: list[float]) -> dict[str, Any]:
    """All values in order, and their median."""
    values = sorted(values)
    return {name: [round(each, 2) for each in values], f"median_{name}": round(values[len(values) // 2], 2)}


@dataclass(frozen=True)
class Planned:
    """One plan: wall-clock seconds to its end and to its first line, CPU seconds, and its resident peak in bytes."""

    seconds: float
    first_line_seconds: float
    cpu_seconds: float
    peak_resident_bytes: int


def _twice(config: str, model: str, asked: list[str]) -> tuple[Planned, Planned]:
    """A plan that nothing is kept of, and the same one again."""
    with tempfile.TemporaryDirectory() as cache:
        return _plan(config, model, asked, cache), _plan(config, model, asked, cache)


def _plan(config: str, model: str, asked: list[str], cache: str) -> Planned:
    file = harness.ROOT / "configs" / f"{config}.yaml"
    command = [sys.executable, "-m", "finetune", "plan", str(file), f"model.name={model}", *asked]
    started = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    with process.stdout as output:
        first_line = output.readline()
        said = time.perf_counter() - started
        output.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 6), f"plan ended with {code}"
    assert model.encode() in first_line, first_line
    return Planned(seconds, said, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)  # in KiB


def _imports() -> float:
    """Seconds to import what a plan needs and do nothing."""
    code = (
        "from finetune.runtime import libraries\nwith libraries.importing():\n"
        "    from finetune.resolve import planning; from finetune.report.terminal import Terminal"
    )
    started = time.perf_counter()
    harness.succeeded(harness.python("-c", code))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
