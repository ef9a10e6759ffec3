"""Extrapolate layers: the trace of a deep model from that of a shallow one.

A decoder's layers are alike, so tracing more than a few of them takes time without adding information. A stretch of
like layers is shortened to five of its units (a unit is one layer, or several if kinds alternate): the first, three
from the middle, and the last. In the trace of the short model, the events of the first middle unit are then repeated
for those left out. This is not an estimate: it holds if the first two middle units did exactly the same, each relative
to itself and its neighbours, and that is checked event by event. If they did not, `NotAlike` is raised, and the whole
model must be traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from finetune.forecast.trace import Stretch, Trace, TracedBlock

_KEPT = 5  # the first, three of the middle, and the last
_LONGEST_UNIT = 8
_LASTING = ("base_weights", "quantization_state", "adapter", "gradients", "optimizer_states")


class NotAlike(Exception):
    """Two units that were taken to be alike did different things."""


@dataclass(frozen=True)
class Shortened:
    """Which layers to keep, and how the trace of what is left is to be repeated.

    `layers`: the indices kept; `unit`: for each of them its unit; `repeats`: for each unit, for how many it stands.
    """

    layers: tuple[int, ...]
    unit: tuple[int, ...]
    repeats: tuple[int, ...]


def shorten(kinds: Sequence[Hashable]) -> Shortened:
    """The layers to keep of a model whose layers are of these kinds."""
    layers: list[int] = []
    unit: list[int] = []
    repeats: list[int] = []
    start = 0
    while start < len(kinds):
        size, times = _repetition(kinds, start)
        kept = list(range(times)) if times <= _KEPT else [*range(_KEPT - 1), times - 1]
        for number in kept:
            layers += range(start + number * size, start + (number + 1) * size)
            unit += [len(repeats)] * size
            repeats.append(times - _KEPT + 1 if times > _KEPT and number == 1 else 1)
        start += size * times
    return Shortened(tuple(layers), tuple(unit), tuple(repeats))


def whole(layers: int) -> Shortened:
    """Every layer kept."""
    return Shortened(tuple(range(layers)), tuple(range(layers)), (1,) * layers)


def _repetition(kinds: Sequence[Hashable], start: int) -> tuple[int, int]:
    """(layers in a unit, units) of the stretch from `start` that saves most; the smallest unit of those."""

    def times(size: int) -> int:
        unit, count = kinds[start : start + size], 1
        while kinds[start + count * size : start + (count + 1) * size] == unit:
            count += 1
        return count

    sizes = range(1, min(_LONGEST_UNIT, len(kinds) - start) + 1)
    best = max(sizes, key=lambda size: (size * (times(size) - _KEPT), -size))
    return (best, times(best)) if times(best) > _KEPT else (1, 1)


def extrapolate(trace: Trace, shortened: Shortened) -> Trace:
    """The trace of the whole model. Raises NotAlike where what was taken to repeat does not."""
    if set(shortened.repeats) <= {1}:
        return trace
    return _Extrapolation(trace, shortened).whole()


# Which of its owner's blocks one is: whether it was made outside the layers, the phase that made it, and its number
# among those. The first layer makes fewer than the others in a backward pass that ends there, and not in what follows.
_Place = tuple[bool, str, int]
# An event relative to the unit it happens in: +1 or -1, how far away the block's owner is (None: outside the layers),
# and which of the owner's blocks it is.
_Relative = tuple[int, int | None, _Place]


class _Extrapolation:
    def __init__(self, trace: Trace, shortened: Shortened) -> None:
        self._trace = trace
        self._repeats = shortened.repeats
        self._first = [0, *accumulate(shortened.repeats)]
        self._owner = [None if block.layer is None else shortened.unit[block.layer] for block in trace.blocks]
        self._stretches = [
            (stretch, None if stretch.layer is None else shortened.unit[stretch.layer]) for stretch in trace.stretches
        ]
        adopted = self._adopt()
        made_in = [stretch.phase for stretch in trace.stretches for event in stretch.events if event > 0]
        counts: Counter[tuple[int | None, bool, str]] = Counter()
        self._place: list[_Place] = []
        for number, (owner, phase) in enumerate(zip(self._owner, made_in, strict=True)):
            kind = (owner, number in adopted, phase)
            self._place.append((number in adopted, phase, counts[kind]))
            counts[kind] += 1
        self._blocks: list[TracedBlock] = []
        self._numbers: dict[tuple[int | None, _Place], int] = {}
        self._made: list[Stretch] = []

    def _adopt(self) -> set[int]:
        """Blocks made outside the layers and freed by a unit, such as the gradient of its router, are that unit's."""
        adopted = set()
        for stretch, unit in self._stretches:
            if unit is not None:
                for event in stretch.events:
                    if event < 0 and self._owner[-event - 1] is None:
                        self._owner[-event - 1] = unit
                        adopted.add(-event - 1)
        return adopted

    def whole(self) -> Trace:
        for repeated, times in enumerate(self._repeats):
            if times > 1:
                self._check(repeated)
        earlier: int | None = None
        at = 0
        while at < len(self._stretches):
            stretch, unit = self._stretches[at]
            if unit is None:
                self._outside(stretch)
                at += 1
                continue
            end = at
            while end < len(self._stretches) and self._stretches[end][1] == unit:
                end += 1
            copies = range(self._first[unit], self._first[unit + 1])
            falling = earlier is not None and earlier > unit
            for number in reversed(copies) if falling else copies:
                for stretch, _ in self._stretches[at:end]:
                    self._copy(stretch, unit, number)
            earlier, at = unit, end
        return replace(self._trace, blocks=self._blocks, stretches=self._made)

    def _check(self, unit: int) -> None:
        """Raise NotAlike unless `unit` and the next one did the same."""
        one, other = self._done_by(unit), self._done_by(unit + 1)
        if one != other:
            raise NotAlike(f"units {unit} and {unit + 1} of the layers differ")
        if self._reaches_up(unit - 1) != self._reaches_up(unit):
            raise NotAlike(f"unit {unit - 1} of the layers frees what is unit {unit}'s, as that one does not")
        # The first and the last may come and go otherwise, but what stays with a layer is the same for all.
        stretch = range(unit - 1, unit - 1 + _KEPT)
        if len({frozenset(self._keeps(each).items()) for each in stretch}) > 1:
            raise NotAlike(f"what units {stretch[0]} to {stretch[-1]} of the layers keep differs")
        for owner in (None, *range(len(self._repeats))):
            if owner is not None and abs(owner - unit) <= 1:
                continue
            if any(event[1] == (None if owner is None else owner - unit) for _, events in one for event in events):
                raise NotAlike(f"unit {unit} of the layers reaches beyond its neighbours")

    def _reaches_up(self, unit: int) -> Counter[tuple[str, _Place]]:
        """The blocks of the unit above that this one frees, by phase."""
        return Counter((phase, event[2]) for phase, events in self._done_by(unit) for event in events if event[1] == 1)

    def _keeps(self, unit: int) -> Counter[str]:
        """Bytes by category of the blocks that outlive a step."""
        kept: Counter[str] = Counter()
        for block, owner in zip(self._trace.blocks, self._owner, strict=True):
            if owner == unit and block.category in _LASTING:
                kept[block.category] += block.bytes
        return kept

    def _done_by(self, unit: int) -> list[tuple[str, list[tuple[int, int | None, _Place, int, str]]]]:
        found = []
        for stretch, owner in self._stretches:
            if owner == unit:
                events = []
                for event in stretch.events:
                    block = self._trace.blocks[abs(event) - 1]
                    events.append((*self._relative(event, unit), block.bytes, block.category))
                found.append((stretch.phase, events))
        return found

    def _relative(self, event: int, unit: int) -> _Relative:
        number = abs(event) - 1
        owner = self._owner[number]
        return (1 if event > 0 else -1, None if owner is None else owner - unit, self._place[number])

    def _outside(self, stretch: Stretch) -> None:
        made = Stretch(stretch.phase, None, work=stretch.work)
        for event in stretch.events:
            number = abs(event) - 1
            owner = self._owner[number]
            copies: list[int | None] = [None]
            if owner is not None:
                copies = [*range(self._first[owner], self._first[owner + 1])]
            for copy in copies:
                made.events.append(self._event(event, copy))
        self._made.append(made)

    def _copy(self, stretch: Stretch, unit: int, copy: int) -> None:
        made = Stretch(stretch.phase, copy, work=stretch.work)
        for event in stretch.events:
            owner = self._owner[abs(event) - 1]
            made.events.append(self._event(event, None if owner is None else self._neighbour(owner, unit, copy)))
        self._made.append(made)

    def _neighbour(self, owner: int, unit: int, copy: int) -> int:
        """Which copy of `owner` is meant in copy number `copy` of `unit`."""
        if self._repeats[unit] == 1 and self._repeats[owner] == 1:
            return self._first[owner]
        if abs(owner - unit) > 1:
            raise NotAlike(f"unit {unit} of the layers reaches unit {owner}, which stands for several")
        return copy + owner - unit

    def _event(self, event: int, owner: int | None) -> int:
        number = abs(event) - 1
        key = (owner, self._place[number])
        if event > 0:
            block = self._trace.blocks[number]
            self._blocks.append(TracedBlock(block.bytes, block.category, owner, block.managed))
            self._numbers[key] = len(self._blocks)
            return len(self._blocks)
        if key not in self._numbers:
            raise NotAlike(f"unit {owner} of the layers has no block {key[1]} that its like has")
        return -self._numbers[key]
