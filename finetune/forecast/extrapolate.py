"""Extrapolate layers: the trace of a deep model from that of a shallow one.

A decoder's layers are alike, so tracing more than a few of them takes time without adding information. A stretch of
like layers is shortened to five of its units (a unit is one layer, or several if kinds alternate): the first, three
from the middle, and the last. In the trace of the short model, the events of the first middle unit are then repeated
for those left out. This is not an estimate: it holds if the first two middle units did exactly the same, each relative
to itself and its neighbours, and that is checked event by event. If they did not, `NotAlike` is raised, and the whole
model must be traced.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from finetune.forecast.trace import Stretch, Trace, TracedBlock

_KEPT = 5  # the first, three of the middle, and the last
_LONGEST_UNIT = 8
_LASTING = ("base_weights", "quantization_state", "adapter", "gradients", "optimizer_states")


class NotAlike(Exception):
    """Two units that were taken to be alike did different things."""


@dataclass(frozen=True)
class Shortened:
    """The layers to keep, and how their trace is to be repeated.

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


class _BlockKey(NamedTuple):
    """Which of its owner's blocks one is: like units have blocks of the same keys.

    `adopted`: whether it was made outside the layers. `number` counts the owner's blocks of one phase apart, as the
    first layer makes fewer than the others in a backward pass that ends there, and not in what follows.
    """

    adopted: bool
    phase: str
    number: int


class _RelativeEvent(NamedTuple):
    """An event relative to the unit it happens in: +1 or -1, and how many units away the block's owner is.

    `distance` is None for a block outside the layers.
    """

    sign: int
    distance: int | None
    key: _BlockKey
    bytes: int
    category: str


class _Extrapolation:
    """The whole model's trace, made of the events of the short one's.

    An example with units of one layer. The forward pass makes an activation (a) in each. The backward pass of a layer
    makes the gradient of its input (g), and frees the gradient that it was given, the next layer's, and its activation:

        forward   layer 1: +a1            layer 2: +a2
        backward  layer 2: +g2 -g3 -a2    layer 1: +g1 -g2 -a1

    Relative to themselves both layers did the same: in the forward pass (+1, distance 0, first block of "forward"), in
    the backward pass (+1, 0, first of "backward"), (-1, 1, first of "backward"), (-1, 0, first of "forward"). So what
    layer 1 did stands for any layer n between: +an; +gn -g(n+1) -an.
    """

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
        self._keys: list[_BlockKey] = []
        for number, (owner, phase) in enumerate(zip(self._owner, made_in, strict=True)):
            kind = (owner, number in adopted, phase)
            self._keys.append(_BlockKey(number in adopted, phase, counts[kind]))
            counts[kind] += 1
        self._blocks: list[TracedBlock] = []
        self._numbers: dict[tuple[int | None, _BlockKey], int] = {}
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
        for unit, group in itertools.groupby(self._stretches, key=lambda pair: pair[1]):
            stretches = [stretch for stretch, _ in group]
            if unit is None:
                for stretch in stretches:
                    self._outside(stretch)
                continue
            copies = range(self._first[unit], self._first[unit + 1])
            falling = earlier is not None and earlier > unit
            for copy in reversed(copies) if falling else copies:
                for stretch in stretches:
                    self._copy(stretch, unit, copy)
            earlier = unit
        return replace(self._trace, blocks=self._blocks, stretches=self._made)

    def _check(self, unit: int) -> None:
        """Raise NotAlike unless `unit` and the next one did the same."""
        done = self._done_by(unit)
        if done != self._done_by(unit + 1):
            raise NotAlike(f"units {unit} and {unit + 1} of the layers differ")
        if self._reaches_up(unit - 1) != self._reaches_up(unit):
            raise NotAlike(f"unit {unit - 1} of the layers frees what is unit {unit}'s, as that one does not")
        # The first and the last may come and go otherwise, but what stays with a layer is the same for all.
        stretch = range(unit - 1, unit - 1 + _KEPT)
        if len({frozenset(self._keeps(each).items()) for each in stretch}) > 1:
            raise NotAlike(f"what units {stretch[0]} to {stretch[-1]} of the layers keep differs")
        distances = {event.distance for _, events in done for event in events}
        if distances - {-1, 0, 1}:
            raise NotAlike(f"unit {unit} of the layers reaches beyond its neighbours")

    def _reaches_up(self, unit: int) -> Counter[tuple[str, _BlockKey]]:
        """The blocks of the unit above that this one frees, by phase."""
        return Counter(
            (phase, event.key) for phase, events in self._done_by(unit) for event in events if event.distance == 1
        )

    def _keeps(self, unit: int) -> Counter[str]:
        """Bytes by category of the blocks that outlive a step."""
        kept: Counter[str] = Counter()
        for block, owner in zip(self._trace.blocks, self._owner, strict=True):
            if owner == unit and block.category in _LASTING:
                kept[block.category] += block.bytes
        return kept

    def _done_by(self, unit: int) -> list[tuple[str, list[_RelativeEvent]]]:
        """The events of each stretch of a unit with their phase, expressed relative to the unit."""
        return [
            (stretch.phase, [self._relative(event, unit) for event in stretch.events])
            for stretch, owner in self._stretches
            if owner == unit
        ]

    def _relative(self, event: int, unit: int) -> _RelativeEvent:
        number = abs(event) - 1
        block, owner = self._trace.blocks[number], self._owner[number]
        distance = None if owner is None else owner - unit
        return _RelativeEvent(1 if event > 0 else -1, distance, self._keys[number], block.bytes, block.category)

    def _outside(self, stretch: Stretch) -> None:
        """Add a stretch outside the layers: what it does to a unit's blocks is done to those of each copy."""
        made = Stretch(stretch.phase, None, work=stretch.work)
        for event in stretch.events:
            owner = self._owner[abs(event) - 1]
            copies = [None] if owner is None else range(self._first[owner], self._first[owner + 1])
            made.events += [self._event(event, copy) for copy in copies]
        self._made.append(made)

    def _copy(self, stretch: Stretch, unit: int, copy: int) -> None:
        """Add a stretch of `unit` as that of its copy."""
        made = Stretch(stretch.phase, copy, work=stretch.work)
        for event in stretch.events:
            owner = self._owner[abs(event) - 1]
            made.events.append(self._event(event, None if owner is None else self._neighbour(owner, unit, copy)))
        self._made.append(made)

    def _neighbour(self, owner: int, unit: int, copy: int) -> int:
        """The copy of `owner` that stands to copy number `copy` of `unit` as `owner` does to `unit`."""
        if self._repeats[unit] == 1 and self._repeats[owner] == 1:
            return self._first[owner]
        if abs(owner - unit) > 1:
            raise NotAlike(f"unit {unit} of the layers reaches unit {owner}, which stands for several")
        return copy + owner - unit

    def _event(self, event: int, owner: int | None) -> int:
        """The event in the whole model's trace, for a block that copy number `owner` has there."""
        number = abs(event) - 1
        key = (owner, self._keys[number])
        if event > 0:
            block = self._trace.blocks[number]
            self._blocks.append(TracedBlock(block.bytes, block.category, owner, block.managed))
            self._numbers[key] = len(self._blocks)
            return len(self._blocks)
        if key not in self._numbers:
            raise NotAlike(f"unit {owner} of the layers has no block {tuple(key[1])} that its like has")
        return -self._numbers[key]
