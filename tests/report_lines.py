"""Lines of metrics.jsonl, as the training writes them."""

from __future__ import annotations

from typing import Any

from finetune.storage.files import append_line
from finetune.storage.rundir import RunDirectory

MIB = 2**20


def training_line(step: int, loss: float | None, **memory_mib: int) -> dict[str, Any]:
    return {
        "step": step, "loss": loss, "learning_rate": 2e-4, "grad_norm": 1.0, "epoch": step / 10, "tokens": 100 * step,
        "tokens_per_second": 1000.0 * step, "padding_share": 0.5 if step == 1 else 0.0,
        "memory": {phase: {"resident_bytes": size * MIB} for phase, size in memory_mib.items()},
    }  # fmt: skip


def evaluation_line(step: int, loss: float | None, size_mib: int = 700) -> dict[str, Any]:
    return {"step": step, "eval_loss": loss, "memory": {"evaluation": {"resident_bytes": size_mib * MIB}}}


def write_lines(run: RunDirectory, *lines: dict[str, Any]) -> None:
    for line in lines:
        append_line(run.metrics_file, line)
