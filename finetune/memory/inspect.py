"""Looks into memory for a person: allocator snapshots, profiler traces, and the cap on a card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.errors import OutOfMemoryError
from finetune.memory import kernels

# Allocations kept in a recorded history; older ones are dropped, so that a long run does not fill the host.
_HISTORY_ENTRIES = 200_000


def cap(limit_bytes: int | None, device: torch.device) -> None:
    """Let this process take no more than `limit_bytes` of the card, or all of it for None.

    More is out of memory, as on a smaller card. The CUDA context counts, as it does in a forecast's budget (see
    `Device.room_bytes`), so what the caching allocator may reserve is the rest; where its segments grow, torch counts
    the request and maps whole pages, up to 18 MiB more, which fits within the allowance for the context. Managed memory
    (paged optimizer states) is not counted by it (torch.cuda.set_per_process_memory_fraction). Raises OutOfMemoryError
    where the context alone takes the limit.
    """
    if device.type != "cuda":
        return
    card = torch.cuda.get_device_properties(device)
    if not limit_bytes or limit_bytes >= card.total_memory:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    room = limit_bytes - kernels.context_bytes(card.multi_processor_count)
    if room <= 0:
        raise OutOfMemoryError(
            f"`memory.limit` leaves nothing beside the CUDA context, which takes up to "
            f"{(limit_bytes - room) / 2**20:.0f} MiB of this card; raise it"
        )
    # torch multiplies the share by the total and rounds down: with the half byte, to `room`.
    torch.cuda.set_per_process_memory_fraction((room + 0.5) / card.total_memory, device)


@contextlib.contextmanager
def recorded(snapshot_file: Path, device: torch.device, history: bool) -> Iterator[None]:
    """Write an allocator snapshot at the end when `history` is on, and in any case when the block runs out of memory.

    Open the file at https://pytorch.org/memory_viz. Does nothing on a CPU, which has no caching allocator.
    """
    if device.type != "cuda":
        yield
        return
    if history:
        torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES)
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.memory._dump_snapshot(str(snapshot_file))
        raise
    else:
        if history:
            torch.cuda.memory._dump_snapshot(str(snapshot_file))
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)


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
