"""Converts failures of libraries and of the machine into errors that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from finetune.errors import MachineError, OutOfMemoryError
from finetune.forecast.levers import levers
from finetune.resolve import Job
from finetune.runtime import memory_snapshots, ranks
from finetune.runtime.memory_monitor import Monitor
from finetune.runtime.out_of_memory import StepOutOfMemoryError, is_out_of_memory, reason
from finetune.storage.files import DISK_ERRORS, not_written
from finetune.storage.rundir import RunDirectory


@contextlib.contextmanager
def out_of_memory(job: Job, run: RunDirectory, monitor: Monitor, device: torch.device) -> Iterator[None]:
    """Convert torch's out-of-memory error, in loading or in a step, into OutOfMemoryError with the levers, in order.

    Notes on the error (PEP 678) say what did not fit. With `memory.snapshot`, an allocator snapshot is written to the
    run directory.
    """
    try:
        with memory_snapshots.recorded(run.snapshot_file, device, job.config.memory.snapshot):
            yield
    except OutOfMemoryError:  # raised in a save, with what to do
        _record(run, monitor)
        raise
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _record(run, monitor)
        snapshot = f"\nAllocator snapshot: {run.snapshot_file}" if run.snapshot_file.exists() else ""
        first = "\n".join([reason(error), *getattr(error, "__notes__", ())])
        of_step = error if isinstance(error, StepOutOfMemoryError) else StepOutOfMemoryError("")
        explained = OutOfMemoryError(
            f"out of memory: {first}\nTry, in this order: {'; '.join(map(str, levers(job.config)))}.{snapshot}",
            next_start=of_step.next_start,
        )
        raise (ranks.shared(explained) if of_step.on_all_ranks else explained) from None


def _record(run: RunDirectory, monitor: Monitor) -> None:
    monitor.leave()
    with contextlib.suppress(MachineError):  # a disk that is full as well must not hide why the run ended
        run.event("out_of_memory", memory=monitor.peaks)


@contextlib.contextmanager
def disk_errors(run: RunDirectory) -> Iterator[None]:
    """Convert an OSError of a full, failing or read-only disk into MachineError."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise MachineError(not_written(Path(error.filename or run.path), error)) from None
