"""A sweep of eight settings beside eight lone runs, as whole processes: time, memory, and the same winner.

Writes benchmarks/results/sweeps.json. The base is the built-in one.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import harness

RATES = ["1e-4", "3e-4", "1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2", "3e-2"]
JOB = ["output.merge=false", "training.eval_every=null"]


def main() -> None:
    arguments = harness.parser(__doc__, "sweeps.json").parse_args()
    with tempfile.TemporaryDirectory(prefix="sweeps-") as scratch:
        lone = [_lone(Path(scratch), rate) for rate in RATES]
        full, halved = (_sweep(Path(scratch), *options) for options in (["--full"], []))
    best = min(lone, key=lambda run: run["eval_loss"])
    seconds = sum(run["seconds"] for run in lone)
    harness.save(
        arguments.output,
        {
            "lone_runs": {"seconds": round(seconds, 1), "resident_peak": max(run["resident_peak"] for run in lone),
                          "winner": f"learning_rate={best['rate']}", "runs": lone},
            "full": full | {"time": round(full["seconds"] / seconds, 3)},
            "halved": halved | {"time": round(halved["seconds"] / seconds, 3)},
        },
    )  # fmt: skip


def _lone(scratch: Path, rate: str) -> dict[str, Any]:
    run = scratch / f"lone-{rate}"
    done = harness.succeeded(
        harness.python("-m", "finetune", "train", harness.ROOT / "configs/tiny_cpu.yaml", *JOB, f"output.dir={run}",
                       f"training.learning_rate={rate}")
    )  # fmt: skip
    lines = harness.read_lines(run / "metrics.jsonl")
    loss = [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
    return {
        "rate": rate,
        "seconds": round(done.wall_seconds, 1),
        "resident_peak": harness.resident_peak(lines),
        "eval_loss": loss,
    }


def _sweep(scratch: Path, *options: str) -> dict[str, Any]:
    folder = scratch / f"sweep{''.join(options)}"
    done = harness.succeeded(
        harness.python("-m", "finetune", "sweep", harness.ROOT / "configs/tiny_cpu.yaml", *JOB, f"output.dir={folder}",
                       f"training.learning_rate={','.join(RATES)}", *options)
    )  # fmt: skip
    table = json.loads((folder / "sweep.json").read_text())
    lines = [harness.read_lines(file) for file in folder.glob("*/metrics.jsonl")]
    settings = [{key: each[key] for key in ("setting", "state", "share", "loss")} for each in table["settings"]]
    return {
        "seconds": round(done.wall_seconds, 1), "winner": table["winner"],
        "resident_peak": max(map(harness.resident_peak, lines)),
        "undecided": table["undecided"], "settings": settings,
    }  # fmt: skip


if __name__ == "__main__":
    main()
