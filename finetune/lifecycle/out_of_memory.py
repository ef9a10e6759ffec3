"""Out of memory, told: what happened, the levers in order, and an allocator snapshot to look into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from finetune.config import Config
from finetune.errors import OutOfMemoryError
from finetune.forecast.levers import levers
from finetune.measure import snapshots
from finetune.measure.monitor import Monitor
from finetune.measure.out_of_memory import is_out_of_memory
from finetune.storage.rundir import RunDirectory


@contextlib.contextmanager
def told(config: Config, run: RunDirectory, monitor: Monitor, device: torch.device) -> Iterator[None]:
    """Turn torch's out of memory, in loading or in a step, into OutOfMemoryError with the levers (exit code 6).

    Notes on the error (PEP 678) say what it was that did not fit.
    """
    try:
        with snapshots.recorded(run.snapshot_file, device, config.memory.snapshot):
            yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        monitor.leave()
        run.event("out_of_memory", memory=monitor.run)
        snapshot = f"\nAllocator snapshot: {run.snapshot_file}" if run.snapshot_file.exists() else ""
        first = "\n".join([(str(error).splitlines() or ["no memory left"])[0], *getattr(error, "__notes__", ())])
        raise OutOfMemoryError(
            f"out of memory: {first}\nTry, in this order: {'; '.join(map(str, levers(config)))}.{snapshot}"
        ) from None


@contextlib.contextmanager
def told_of_merge(run: RunDirectory) -> Iterator[None]:
    """Turn out of memory in a merge into OutOfMemoryError: the training is over, and only the merge is to be redone."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = (str(error).splitlines() or ["no memory left"])[0]
        raise OutOfMemoryError(
            f"out of memory while merging: {first}\n{run.adapter} is complete and was not touched; `finetune merge "
            f"{run.path}` merges it where there is more memory, or once some is free"
        ) from None
