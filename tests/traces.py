"""Traces written by hand, and what is asked of any trace."""

from __future__ import annotations

from typing import Self

from finetune.forecast.trace import Block, Run, Trace

Events = list[tuple[str, int | None, int, int, str]]


class Story:
    """Writes a trace: `at` a place, `make` a block under a name, `drop` it."""

    def __init__(self) -> None:
        self.trace = Trace([], [])
        self._numbers: dict[str, int] = {}

    def at(self, phase: str, layer: int | None = None) -> Self:
        self.trace.runs.append(Run(phase, layer))
        return self

    def make(self, name: str, size_bytes: int, category: str = "activations", *, managed: bool = False) -> Self:
        run = self.trace.runs[-1]
        self.trace.blocks.append(Block(size_bytes, category, run.layer, managed))
        self._numbers[name] = len(self.trace.blocks)
        run.events.append(self._numbers[name])
        return self

    def drop(self, *names: str) -> Self:
        self.trace.runs[-1].events += [-self._numbers.pop(name) for name in names]
        return self

    def work(self, flops: int = 0, moved_bytes: int = 0, calls: int = 0) -> Self:
        work = self.trace.runs[-1].work
        work.flops, work.moved_bytes, work.calls = flops, moved_bytes, calls
        return self


def events(trace: Trace) -> Events:
    """Every event in words: phase, layer, +1 or -1, bytes, category."""
    return [(run.phase, block.layer, sign, block.bytes, block.category) for run, block, sign in trace.timeline()]


def peaks(trace: Trace) -> dict[str, int]:
    """The most bytes alive in each phase."""
    live, found = 0, dict[str, int]()
    for run, block, sign in trace.timeline():
        live += sign * block.bytes
        found[run.phase] = max(found.get(run.phase, 0), live)
    return found
