"""What the real caching allocator did on a GPU, kept so that the model can be checked where there is none.

The history of torch.cuda.memory._record_memory_history holds every request and every segment. A recording keeps the
requests, the moments at which cached memory was released, and the peaks that came of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from finetune.forecast.allocator import CachingAllocator

RELEASE = 0

_TAKEN = ("segment_alloc", "segment_map")
_RELEASED = ("segment_free", "segment_unmap")
_KEPT = ("alloc", "free_completed", *_TAKEN, *_RELEASED)


class Peaks(NamedTuple):
    """Largest bytes at one time; `allocated_bytes` is None where it was not recorded."""

    allocated_bytes: int | None
    reserved_bytes: int


class Replay(NamedTuple):
    """The peaks of one sequence of requests, from the model and from the GPU."""

    modelled: Peaks
    recorded: Peaks


@dataclass(frozen=True)
class Recording:
    """A run of the real allocator from its empty state.

    An event above 0 is a request of so many bytes, one below 0 frees the request of that number (-1 is the first
    one), and RELEASE gives cached memory back: torch does so in empty_cache and before it gives up on a request.
    """

    expandable_segments: bool
    peak_reserved_bytes: int
    peak_allocated_bytes: int | None
    events: tuple[int, ...]

    @classmethod
    def from_history(
        cls,
        entries: Iterable[Mapping[str, Any]],
        *,
        expandable_segments: bool,
        peak_allocated_bytes: int | None = None,
    ) -> Recording:
        """From `torch.cuda.memory._snapshot()["device_traces"][0]`, recorded from an empty allocator.

        `peak_allocated_bytes`: torch.cuda.max_memory_allocated() after the run. The history does not tell it: an
        entry has the requested size and not the block's [record_trace in alloc_found_block]. The reserved peak is
        the sum of the segments. Raises ValueError for a history of several streams, which the model has not, and
        for one that does not begin at an empty allocator (the buffer of the history was too short).
        """
        kept = [entry for entry in entries if entry["action"] in _KEPT]
        if len({entry.get("stream", 0) for entry in kept}) > 1:
            raise ValueError("the history is of several streams")
        events: list[int] = []
        live: dict[int, int] = {}
        requests = reserved = peak = 0
        for entry in kept:
            action, address, size = entry["action"], entry["addr"], entry["size"]
            if action == "alloc":
                requests += 1
                live[address] = requests
                events.append(size)
            elif action == "free_completed":
                if address not in live:
                    raise ValueError(f"the history frees {address:#x}, which it did not allocate")
                events.append(-live.pop(address))
            elif action in _TAKEN:
                reserved += size
                peak = max(peak, reserved)
            else:
                reserved -= size
                if reserved < 0:
                    raise ValueError("the history releases more segments than it made")
                if not events or events[-1] != RELEASE:
                    events.append(RELEASE)
        return cls(expandable_segments, peak, peak_allocated_bytes, tuple(events))

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Recording:
        fields = json.loads(text)
        return cls(**{**fields, "events": tuple(fields["events"])})


def replay(recording: Recording) -> Replay:
    """The recorded requests once more, on the model.

    The device has no end here: where it mattered, the recording says at which moment memory was released.
    """
    model = CachingAllocator(expandable_segments=recording.expandable_segments)
    handles: list[int] = []
    for event in recording.events:
        if event > 0:
            handles.append(model.allocate(event))
        elif event == RELEASE:
            model.empty_cache()
        else:
            model.free(handles[-event - 1])
    return Replay(
        modelled=Peaks(model.peak_allocated_bytes, model.peak_reserved_bytes),
        recorded=Peaks(recording.peak_allocated_bytes, recording.peak_reserved_bytes),
    )
