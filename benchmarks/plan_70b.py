"""What docs/many-gpus.md shows of Llama-3.1-70B on several cards: the plan of one of them. Forecasts alone.

    python benchmarks/plan_70b.py

Writes benchmarks/results/plan_70b.json, with the time and memory that each plan takes itself. No GPU, no weights.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from typing import Any

import harness

CONFIG = "configs/llama70b_qlora.yaml"
MODEL = "model.name=meta-llama/Llama-3.1-70B"
MOST_SECONDS, MOST_BYTES = 60, 4 * 2**30
JOBS: list[tuple[str, str, int, list[str]]] = [
    ("QLoRA", "RTX 4090", 2, []),
    ("QLoRA, slices in host memory", "RTX 4090", 2, ["distributed.kind=fsdp", "distributed.offload=cpu"]),
    ("16-bit LoRA", "H100", 8, ["quantization.kind=none"]),
    ("16-bit LoRA", "H100", 64, ["quantization.kind=none", "training.batch_size=64"]),
]
"""Name, card, number of them, and what the job changes of the config."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    plans = [_plan(*job) for job in JOBS]
    result: dict[str, Any] = {
        "command": harness.command_line(),
        "environment": harness.environment(),
        "config": CONFIG,
        "model": MODEL,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "plans": plans,
    }
    result["holds"] = {
        f"each plan takes at most {MOST_SECONDS} s": all(one["seconds"] <= MOST_SECONDS for one in plans),
        "and at most 4 GiB": result["peak_resident_bytes"] <= MOST_BYTES,
    }
    harness.write_result(harness.RESULTS / "plan_70b.json", result)
    header = ["job", "cards", "chosen", "needs GiB", "of", "fits", "host GiB", "planned in s"]
    rows = [
        [one["job"], f"{one['gpus']} x {one['card']}", " ".join(one["plan"]["sharding"].values()),
         *(harness.gib(one["plan"][key]) for key in ("needed_bytes", "budget_bytes")), one["plan"]["fits"],
         harness.gib(one["plan"]["host_bytes"]), f"{one['seconds']:.0f}"]
        for one in plans
    ]  # fmt: skip
    print(harness.table(header, rows), result["holds"], sep="\n\n")
    sys.exit(0 if all(result["holds"].values()) else 1)


def _plan(name: str, card: str, gpus: int, changes: list[str]) -> dict[str, Any]:
    done = harness.python(
        "-m", "finetune", "plan", CONFIG, MODEL, *changes, "--gpu", card, "--gpus", str(gpus), "--json"
    )
    if done.exit_code != 6:  # it may not fit
        harness.succeeded(done)
    plan = json.loads(done.output)
    del plan["levers"]
    return {
        "job": name, "card": card, "gpus": gpus, "changes": changes, "plan": plan,
        "seconds": round(done.wall_seconds, 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()
