"""Out of memory, told: what happened, the levers in order, and an allocator snapshot to look into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from finetune.config import Config
from finetune.errors import OutOfMemoryError
from finetune.memory import inspect
from finetune.memory.levers import levers
from finetune.memory.monitor import Monitor
from finetune.rundir import RunDirectory


@contextlib.contextmanager
def told(config: Config, run: RunDirectory, monitor: Monitor, device: torch.device) -> Iterator[None]:
    """Turn torch's out of memory, in loading or in a step, into OutOfMemoryError with the levers (exit code 6)."""
    try:
        with inspect.recorded(run.snapshot_file, device, config.memory.snapshot):
            yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        monitor.leave()
        run.event("out_of_memory", memory=monitor.run)
        snapshot = f"\nAllocator snapshot: {run.snapshot_file}" if run.snapshot_file.exists() else ""
        first = (str(error).splitlines() or ["no memory left"])[0]
        raise OutOfMemoryError(
            f"out of memory: {first}\nTry, in this order: {'; '.join(map(str, levers(config)))}.{snapshot}"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; torch's CPU allocator raises a plain RuntimeError for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
