"""Traces written by hand, what is asked of any trace, and what the profiler sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import measured_step
from torch.profiler import ProfilerActivity, profile

from finetune.forecast.trace import Stretch, Trace, TracedBlock

Events = list[tuple[str, int | None, int, int, str]]


class Story:
    """Writes a trace: `at` a phase and layer, `make` a block under a name, `drop` it."""

    def __init__(self) -> None:
        self.trace = Trace([], [])
        self._numbers: dict[str, int] = {}

    def at(self, phase: str, layer: int | None = None) -> Self:
        self.trace.stretches.append(Stretch(phase, layer))
        return self

    def make(self, name: str, size_bytes: int, category: str = "activations", *, managed: bool = False) -> Self:
        stretch = self.trace.stretches[-1]
        self.trace.blocks.append(TracedBlock(size_bytes, category, stretch.layer, managed))
        self._numbers[name] = len(self.trace.blocks)
        stretch.events.append(self._numbers[name])
        return self

    def drop(self, *names: str) -> Self:
        self.trace.stretches[-1].events += [-self._numbers.pop(name) for name in names]
        return self

    def work(self, flops: int = 0, moved_bytes: int = 0, calls: int = 0) -> Self:
        work = self.trace.stretches[-1].work
        work.flops, work.moved_bytes, work.calls = flops, moved_bytes, calls
        return self


def events(trace: Trace) -> Events:
    """Every event in words: phase, layer, +1 or -1, bytes, category."""
    return [
        (stretch.phase, block.layer, sign, block.bytes, block.category) for stretch, block, sign in trace.timeline()
    ]


def peaks(trace: Trace) -> dict[str, int]:
    """The most bytes alive in each phase."""
    live, found = 0, dict[str, int]()
    for stretch, block, sign in trace.timeline():
        live += sign * block.bytes
        found[stretch.phase] = max(found.get(stretch.phase, 0), live)
    return found


def profiled(act: Callable[[], object]) -> list[int]:
    """Bytes of every allocation of `act`, and below 0 of every free, in order, by the profiler; its result stays."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _result = act()
    return [event.size_bytes for event in measured_step._events(profiler) if event.size_bytes]
