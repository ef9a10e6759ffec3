"""Memory diagnostics for manual inspection: allocator snapshots and profiler traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Entries kept in a recorded history; older ones are dropped, so that a long run does not fill host memory.
_HISTORY_ENTRIES = 200_000


@contextlib.contextmanager
def recorded(snapshot_file: Path, device: torch.device, history: bool) -> Iterator[None]:
    """Write an allocator snapshot if the block runs out of memory and, with `history`, also at its end.

    View the file at https://pytorch.org/memory_viz. Does nothing on a CPU, which has no caching allocator.
    """
    if device.type != "cuda":
        yield
        return
    # Documented under these names (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
    record, dump = torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot  # noqa: SLF001
    if history:
        record(max_entries=_HISTORY_ENTRIES)
    try:
        yield
    except torch.OutOfMemoryError:
        with contextlib.suppress(OSError):  # a full disk; the error names the snapshot if it was written
            dump(str(snapshot_file))
        raise
    else:
        if history:
            dump(str(snapshot_file))
    finally:
        if history:
            record(enabled=None)


def profiler(steps: int, directory: Path, device: torch.device) -> Any | None:
    """A profiler that warms up in the first step and then traces `steps` steps with memory, or None for 0 steps.

    The trace is a TensorBoard plugin file in `directory`; call `step()` after each optimizer step.
    """
    if steps == 0:
        return None
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    return profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(directory)),
        profile_memory=True,
        record_shapes=True,
    )
