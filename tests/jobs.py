"""The small job that many tests train, and what came of it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from finetune.storage.rundir import RunDirectory

TINY = Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml"

# A job of seconds: short rows, few of them, one evaluation at each end, and no forecast, which takes as long again.
QUICK = [
    "training.max_steps=4", "training.batch_size=4", "training.micro_batch=2", "output.merge=false", "memory.check=off",
]  # fmt: skip


def adapter_weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    """The published adapter."""
    return load_file(run.adapter / "adapter_model.safetensors")


def same_adapter(one: RunDirectory, other: RunDirectory) -> bool:
    """Whether both published the same bits."""
    found, expected = adapter_weights(one), adapter_weights(other)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def metric(run: RunDirectory, *names: str) -> list[Any]:
    """The values of `names` in metrics.jsonl, in order."""
    return [line[name] for line in run.metrics() for name in names if name in line]
