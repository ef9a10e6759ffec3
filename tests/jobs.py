"""The small job that many tests train."""

from pathlib import Path

TINY = Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml"

# A job of seconds: short rows, few of them, one evaluation at each end, and no forecast, which takes as long again.
QUICK = [
    "training.max_steps=4", "training.batch_size=4", "training.micro_batch=2", "output.merge=false", "memory.check=off",
]  # fmt: skip
