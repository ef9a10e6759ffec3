"""One QLoRA job on a GPU by finetune, a plain TRL script, Unsloth and LLaMA-Factory: slices of a GPU check.

A 7B of random weights, the same files for all; NF4 with double quantization, rank 16 on all linear layers,
4 rows of 2,048 tokens a step, bf16, 8-bit paged AdamW, everything recomputed. `SIDES` lists who runs it, each in a
process of its own. Nothing is installed: where a peer is missing, the result says so. Unsloth and LLaMA-Factory need
other versions of the libraries than we do, so they live in environments of their own, whose interpreters
UNSLOTH_PYTHON and LLAMA_FACTORY_PYTHON name.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_jobs
import harness

LOSS_BOUND = 0.01
"""How far losses may differ on a GPU, relative: other kernels and roundings, and other initial adapters."""
BATCH = 4

Side = Callable[[gpu_jobs.Work, str, Path, Path], dict[str, Any]]
"""Runs the job on the weights in a folder and the rows in a file, under the name of the side."""


def finetune(fused: str, checkpointing: str = "all") -> Side:
    def run(work: gpu_jobs.Work, name: str, weights: Path, rows: Path) -> dict[str, Any]:
        changes = {
            **gpu_jobs.overrides(work.sizes, BATCH, rows),
            "model.name": weights,
            "model.weights": "pretrained",
            "kernels.fused": fused,
            "memory.checkpointing": checkpointing,
            "memory.limit": "null",
            "training.learning_rate": 2e-4,
            "training.precision": "bf16",
            "training.schedule": "constant",
            "training.warmup": 0,
        }
        return gpu_jobs.job(work, name, changes)

    return run


def script(file: str, module: str = "trl", checkpointing: str = "all") -> Side:
    """Another program, called by a script and found as a module of an interpreter."""

    def run(work: gpu_jobs.Work, name: str, weights: Path, rows: Path) -> dict[str, Any]:
        python = os.environ.get(f"{name.upper().replace('-', '_')}_PYTHON", sys.executable)
        installed = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if harness.run([python, "-c", installed]).exit_code:
            return {"left_out": "not installed"}
        sizes = work.sizes
        options = {
            "model": weights, "data": rows, "output": work.scratch / name, "checkpointing": checkpointing,
            "batch-size": BATCH, "max-length": sizes.tokens, "max-steps": sizes.steps,
            "warm-up-steps": sizes.warm_up_steps,
        }  # fmt: skip
        named = [f"--{option}={value}" for option, value in options.items()]
        command = [python, harness.ROOT / "benchmarks" / "scripts" / file, *named]
        return gpu_jobs.answer(harness.run(command, log=work.kept / name))

    return run


SIDES: dict[str, Side] = {
    "finetune": finetune("on"),
    "trl": script("plain_qlora.py"),
    "unsloth": script("unsloth_qlora.py", "unsloth"),
    "llama-factory": script("llama_factory_qlora.py", "llamafactory"),
    "finetune-unfused": finetune("off"),
    # Faster where the card has room for it: TRL's best setting, beside ours.
    "finetune-kept": finetune("on", "none"),
    "trl-kept": script("plain_qlora.py", checkpointing="none"),
}


def beside(work: gpu_jobs.Work, sides: Sequence[str]) -> gpu_jobs.Findings:
    """The figures of each side, then the comparison with those that ran in earlier slices, as their results say."""
    weights, made = gpu_jobs.saved_weights(work.shared, work.sizes.large, work.on)
    yield "weights", made
    rows = work.scratch / "rows.jsonl"
    # The same rows in every step, so that their order, which is each program's own, makes no difference.
    harness.write_long_rows(rows, rows=BATCH, tokens=work.sizes.tokens)
    found = {}
    for file in sorted(work.kept.parent.glob("beside-*/findings.json")):
        findings = json.loads(file.read_text(encoding="utf-8"))["findings"]
        found |= {name: findings[name] for name in SIDES if name in findings}
    for name in sides:
        found[name] = SIDES[name](work, name, weights, rows)
        yield name, found[name]
    yield "beside", compared(found)


def compared(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each side's speed as a multiple of TRL's, and how far its losses are from those of the first, at most."""
    ran = {name: found[name] for name in SIDES if found.get(name, {}).get("passed")}
    first = next(iter(ran.values()), {})
    apart = {
        name: max(abs(one / other - 1) for one, other in zip(side["losses"], first["losses"], strict=True))
        for name, side in ran.items()
    }
    speeds = {name: side["tokens_per_second"] for name, side in ran.items()}
    trl = speeds.get("trl", math.nan)
    return {
        "times_as_fast_as_trl": {name: round(speed / trl, 4) for name, speed in speeds.items()},
        "losses_apart": apart,
        "passed": max(apart.values(), default=0) < LOSS_BOUND,
    }
