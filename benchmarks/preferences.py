"""The run of docs/preferences.md: trains configs/tiny_dpo.yaml from scratch, as a user would, and evaluates it.

Writes benchmarks/results/preferences.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

SPAN = 5
"""Steps that a figure of training is the mean of: those of one step are of 16 pairs."""


def main() -> None:
    harness.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="preferences-") as scratch:
        run = Path(scratch) / "runs" / "tiny_dpo"
        config = harness.ROOT / "configs/tiny_dpo.yaml"
        done = harness.succeeded(harness.python("-m", "finetune", "train", config, f"output.dir={run}", threads=1))
        shown = harness.finetune("eval", run, threads=1)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        measures = json.loads((run / "eval.json").read_text())["measures"]
        facts = json.loads((run / "data.json").read_text())
    steps = [line for line in lines if "loss" in line]
    result = {
        "process_seconds": round(done.wall_seconds, 1),
        "rows": {split: facts[split]["rows"] for split in ("train", "eval")},
        "steps": len(steps),
        "eval_losses": {str(line["step"]): line["eval_loss"] for line in lines if "eval_loss" in line},
        "first_step": _means(steps[:1]),
        "first": _means(steps[1 : 1 + SPAN]),
        "last": _means(steps[-SPAN:]),
        "measures": {one["name"]: {"rows": one["rows"], **one["models"]} for one in measures},
    }
    harness.save(harness.RESULTS / "preferences.json", result, threads=1)
    sys.stdout.write(done.output + shown)


def _means(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The means over some steps of the loss and of what the objective records."""
    names = [name for name in steps[0] if name == "loss" or name.startswith(("rewards", "logps"))]
    return {name: round(statistics.fmean(step[name] for step in steps), 4) for name in names}


if __name__ == "__main__":
    main()
