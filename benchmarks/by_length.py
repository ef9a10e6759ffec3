"""What short micro-batches gain where they recompute less than the longest: the same rows, the same budget, one core.

    python benchmarks/by_length.py [--rounds 3]

Rows have log-normal lengths (a median of 60 tokens, cut at 512), grouped by length, four to a micro-batch, on a model
of 25 million random weights. For each of two budgets, both between what the longest micro-batch needs with everything
recomputed and with nothing, `memory.checkpointing: auto` trains an epoch beside the value that it chose for the longest
micro-batch, set for all. The two take turns, and so does the one that begins. Losses must be equal to the bit, and the
tensors counted on the largest batches within their forecast. The resident peak stands beside the budget: tensors of
short rows are small blocks, which glibc keeps in its heap once they are freed, and no forecast knows how many.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import batching
import gpu_jobs
import harness
import yaml
from forecast_cpu import config_json

ROWS, BATCH, MICRO_BATCH = 64, 16, 4
SHARES = (0.3, 0.6)
"""Budgets: this far from what the longest micro-batch needs with everything recomputed to its need with nothing."""
KEY = "memory.checkpointing"
Run = dict[str, Any]


def main() -> None:
    parser = harness.parser(__doc__, "by_length.json")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="by-length-") as scratch:
        job = _job(Path(scratch))
        least, most = (_needed(job, level) for level in ("all", "none"))
        budgets = [int(least + share * (most - least)) for share in SHARES]
        found = [_compared(job, budget, options.rounds, Path(scratch)) for budget in budgets]
    result = {
        "lengths": {
            "rows": ROWS, "median": batching.SPEED_MEDIAN, "sigma": batching.SPREAD, "longest": batching.SPEED_LONGEST,
        },
        "batch_size": BATCH,
        "micro_batch": MICRO_BATCH,
        "needed_bytes": {"all": least, "none": most},
        "budgets": found,
        "passed": all(one["losses_equal"] and one["within_forecast"] for one in found),
    }  # fmt: skip
    harness.save(options.output, result, threads=1)
    sys.exit(0 if result["passed"] else 1)


def _job(scratch: Path) -> list[str]:
    """The config and its overrides."""
    folder, rows = scratch / "model", scratch / "rows.jsonl"
    folder.mkdir()
    values = config_json("llama", 512, 8, (8, 4), 2048)
    (folder / "config.json").write_text(json.dumps(values | {"architectures": ["LlamaForCausalLM"]}))
    # Each run starts from the same weights.
    weights, _ = gpu_jobs.saved_weights(scratch / "weights", str(folder), "cpu")
    batching.write_rows(rows, ROWS)
    return [
        str(harness.ROOT / "configs" / "tiny_cpu.yaml"), f"model.name={weights}",
        f"data.train={rows}", f"data.max_length={batching.SPEED_LONGEST}",
        f"training.batch_size={BATCH}", f"training.micro_batch={MICRO_BATCH}", "training.max_steps=null",
        "training.epochs=1", "training.precision=fp32", "memory.loss_tokens=512", "data.eval=none",
        "training.eval_every=null", "output.merge=false",
    ]  # fmt: skip


def _needed(job: list[str], level: str) -> int:
    plan = harness.finetune("plan", *job, f"{KEY}={level}", "--gpu", "cpu", "--json", threads=1)
    return int(json.loads(plan)["needed_bytes"])


def _compared(job: list[str], budget: int, rounds: int, scratch: Path) -> dict[str, Any]:
    """Alternating pairs of runs under one budget; the first run, which shows what is chosen, is the warm-up."""
    job = [*job, f"memory.budget={budget}B"]
    first = _train(job, "auto", scratch / f"{budget}")
    runs = []
    for turn in range(rounds):
        sides = {"by_length": "auto", "alike": first["checkpointing"]}
        pair = {
            side: _train(job, sides[side], scratch / f"{budget}-{turn}-{side}")
            for side in (sides if turn % 2 else reversed(sides))
        }
        runs.append(pair)
        seconds = {side: f"{run['seconds']:.1f} s" for side, run in pair.items()}
        print(
            f"{harness.mib(budget)} MiB, {first['checkpointing']}, {pair['by_length']['by_length']}: {seconds}",
            flush=True,
        )
    each = [run for pair in runs for run in pair.values()]
    ratios = [pair["by_length"]["seconds"] / pair["alike"]["seconds"] for pair in runs]
    return {
        "budget_bytes": budget,
        "checkpointing": first["checkpointing"],
        "by_length": [pair["by_length"]["by_length"] for pair in runs],
        "seconds": {side: [round(pair[side]["seconds"], 2) for pair in runs] for side in ("by_length", "alike")},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "resident_bytes": {side: max(pair[side]["resident_bytes"] for pair in runs) for side in ("by_length", "alike")},
        "losses_equal": all(run["losses"] == first["losses"] for run in each),
        "within_forecast": all(run["tensor_bytes"] <= run["forecast_bytes"] for run in each),
        "over_budget": round(max(run["resident_bytes"] for run in each) / budget - 1, 3),
    }  # fmt: skip


def _train(job: list[str], checkpointing: Any, run: Path) -> Run:
    """Training seconds of an epoch, peak and losses of one real run, and what was chosen in it."""
    changes = [f"{KEY}={json.dumps(checkpointing)}", f"output.dir={run}"]
    harness.finetune("train", *job, *changes, threads=1, extra=harness.ALLOCATOR)
    steps, forecast = harness.steps(run), json.loads((run / "forecast.json").read_text())
    counted = [peak["allocated_bytes"] for peak in forecast["measured"].values() if "allocated_bytes" in peak]
    return {
        "seconds": sum(map(harness.seconds, steps)),
        "losses": [step["loss"] for step in steps],
        "resident_bytes": harness.resident_peak(steps),
        "tensor_bytes": max(counted),
        "forecast_bytes": max(peak["allocated_bytes"] for peak in forecast["phases"].values()),
        "checkpointing": yaml.safe_load((run / "config.yaml").read_text())["memory"]["checkpointing"],
        "by_length": forecast.get("by_length", []),
    }


if __name__ == "__main__":
    main()
