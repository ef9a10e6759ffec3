"""What docs/benchmarks.md shows of 70B and 8B on several cards: the plan of one of them. Forecasts alone.

    python benchmarks/plan_many_gpus.py

Writes benchmarks/results/plan_many_gpus.json, with the time and memory that each plan takes itself. No GPU, no weights.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import harness

CONFIG = "configs/llama70b_qlora.yaml"
LARGE, SMALL = "model.name=meta-llama/Llama-3.1-70B", "model.name=meta-llama/Llama-3.1-8B"
ZERO = [
    SMALL, "quantization.kind=none", "adapter.kind=none", "optimizer.kind=adamw_torch_fused",
    "distributed.kind=deepspeed",
]  # fmt: skip
HOST = ["distributed.offload=cpu"]
DISK = ["distributed.offload=nvme", "distributed.nvme_path=/nvme"]
MOST_SECONDS, MOST_BYTES = 60, 4 * 2**30
JOBS: list[tuple[str, str, int, list[str]]] = [
    ("QLoRA", "RTX 4090", 2, [LARGE]),
    ("QLoRA, shards in host memory", "RTX 4090", 2, [LARGE, "distributed.kind=fsdp", *HOST]),
    ("16-bit LoRA", "H100", 8, [LARGE, "quantization.kind=none"]),
    ("16-bit LoRA", "H100", 64, [LARGE, "quantization.kind=none", "training.batch_size=64"]),
    ("full fine-tuning of 8B", "H100", 8, [*ZERO, "distributed.stage=weights"]),
    ("full fine-tuning of 8B", "H100", 1, [*ZERO, "distributed.stage=optimizer"]),
    ("the same, states in host memory", "H100", 1, [*ZERO, "distributed.stage=optimizer", *HOST]),
    ("the same, states on a disk", "H100", 1, [*ZERO, "distributed.stage=weights", *DISK]),
]
"""Name, card, number of them, and what the job changes of the config."""


def main() -> None:
    harness.parser(__doc__).parse_args()
    plans = [_plan(*job) for job in JOBS]
    result: dict[str, Any] = {
        "config": CONFIG,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "plans": plans,
    }
    result["holds"] = {
        f"each plan takes at most {MOST_SECONDS} s": all(one["seconds"] <= MOST_SECONDS for one in plans),
        "and at most 4 GiB": result["peak_resident_bytes"] <= MOST_BYTES,
    }
    harness.save(harness.RESULTS / "plan_many_gpus.json", result)
    header = ["job", "cards", "chosen", "needs GiB", "of", "fits", "host GiB", "seconds a step", "planned in s"]
    rows = [
        [one["job"], f"{one['gpus']} x {one['card']}", " ".join(map(str, one["plan"]["sharding"].values())),
         *(harness.gib(one["plan"][key]) for key in ("needed_bytes", "budget_bytes")), one["plan"]["fits"],
         harness.gib(one["plan"]["host_bytes"]), f"{one['plan']['seconds']:.1f}", f"{one['seconds']:.0f}"]
        for one in plans
    ]  # fmt: skip
    print(harness.table(header, rows), result["holds"], sep="\n\n")
    sys.exit(0 if all(result["holds"].values()) else 1)


def _plan(name: str, card: str, gpus: int, changes: list[str]) -> dict[str, Any]:
    done = harness.python("-m", "finetune", "plan", CONFIG, *changes, "--gpu", card, "--gpus", str(gpus), "--json")
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
