"""Extrapolate layers: the trace of a deep model from that of a shallow one.

A decoder's layers are alike, so tracing more than a few of them takes time without adding information. A run of like
layers is shortened to five of its units (a unit is one layer, or several if kinds alternate): the first, two from the
middle, and the last two. In the trace of the short model, the events of the first middle unit are then repeated for
those left out. This is not an estimate: it holds if the first two middle units did exactly the same, each relative to
itself and its neighbours, and that is checked event by event. If they did not, `NotAlike` is raised, and the whole
model must be traced.

Units that make the same blocks in other sizes, as layers of a file of mixed types do, are one run in whatever order:
two of each size are kept from the middle.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from finetune.forecast.trace import Stretch, Trace, TracedBlock

_LONGEST_UNIT = 8
_LASTING = ("base_weights", "quantization_state", "adapter", "gradients", "optimizer_states")


class NotAlike(Exception):
    """Two units that were taken to be alike did different things."""


@dataclass(frozen=True)
class Shortened:
    """The layers to keep, and how their trace is to be repeated.

    `layers`: the indices kept; `unit`: for each of them its unit. `runs`: for each run of like units the kept ones that
    stand for them. `sizes`: for each kept unit, what decides the sizes of its blocks.
    """

    layers: tuple[int, ...]
    unit: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]
    sizes: tuple[Hashable, ...]

    @property
    def repeats(self) -> tuple[int, ...]:
        """For each kept unit, how many units it stands for."""
        return tuple(Counter(itertools.chain(*self.runs))[number] for number in range(len(self.sizes)))


def shorten(kinds: Sequence[Hashable], sizes: Sequence[Hashable] = ()) -> Shortened:
    """The layers to keep of a model whose layers are of these kinds.

    Layers of one kind make the same blocks; `sizes` says for each layer what else decides the sizes of its blocks.
    """
    sizes = sizes or [None] * len(kinds)
    layers: list[int] = []
    unit: list[int] = []
    runs: list[tuple[int, ...]] = []
    of_units: list[Hashable] = []
    start = 0
    while start < len(kinds):
        size, times = _repetition(kinds, sizes, start)
        own = _units(sizes, start, size, times)
        stands = _standing(own)
        # In the order of the short model: the first, those in the middle by size, and the last two.
        kept = sorted(set(stands))
        between = [number for number in kept if 0 < number < len(own) - 2]
        seen = list(dict.fromkeys(own[number] for number in between))
        between.sort(key=lambda number: seen.index(own[number]))
        names: dict[int, int] = {}
        for number in [*kept[:1], *between, *kept[1 + len(between) :]]:
            names[number] = len(of_units)
            layers += range(start + number * size, start + (number + 1) * size)
            unit += [len(of_units)] * size
            of_units.append(own[number])
        runs.append(tuple(names[number] for number in stands))
        start += size * times
    return Shortened(tuple(layers), tuple(unit), tuple(runs), tuple(of_units))


def shorten_apart(kinds: Sequence[Hashable], sizes: Sequence[Hashable] = ()) -> Shortened:
    """As `shorten`, taking layers with other sizes for other kinds."""
    return shorten(list(zip(kinds, sizes, strict=True)) if sizes else kinds)


def whole(kinds: Sequence[Hashable], sizes: Sequence[Hashable] = ()) -> Shortened:
    """Every layer kept."""
    numbers = tuple(range(len(kinds)))
    return Shortened(numbers, numbers, tuple((number,) for number in numbers), ((None,),) * len(kinds))


def _repetition(kinds: Sequence[Hashable], sizes: Sequence[Hashable], start: int) -> tuple[int, int]:
    """(layers in a unit, units) of the run from `start` that saves most; the smallest unit of those."""

    def times(size: int) -> int:
        unit, count = kinds[start : start + size], 1
        while kinds[start + count * size : start + (count + 1) * size] == unit:
            count += 1
        return count

    def saved(size: int) -> int:
        stands = _standing(_units(sizes, start, size, times(size)))
        return size * (len(stands) - len(set(stands)))

    longest = range(1, min(_LONGEST_UNIT, len(kinds) - start) + 1)
    best = max(longest, key=lambda size: (saved(size), -size))
    return (best, times(best)) if saved(best) else (1, 1)


def _units(sizes: Sequence[Hashable], start: int, size: int, times: int) -> list[Hashable]:
    """For each unit of a run, the keys that decide the sizes of its blocks."""
    return [tuple(sizes[first : first + size]) for first in range(start, start + size * times, size)]


def _standing(sizes: Sequence[Hashable]) -> list[int]:
    """For each unit of a run, the kept one that stands for it.

    Kept are the first, the last, and the one before the last, as no other unit has such a neighbour; and of those in
    between two of each size, the second to be compared with the first.
    """
    stands = list(range(len(sizes)))
    like: dict[Hashable, list[int]] = {}
    for number in range(1, len(sizes) - 2):
        like.setdefault(sizes[number], []).append(number)
    for own in like.values():
        for number in own:
            stands[number] = own[0]
        stands[own[-1]] = own[min(1, len(own) - 1)]
    return stands


def extrapolate(trace: Trace, shortened: Shortened) -> Trace:
    """The trace of the whole model. Raises NotAlike where what was taken to repeat does not."""
    return trace if set(shortened.repeats) <= {1} else _Extrapolation(trace, shortened).whole()


class _BlockKey(NamedTuple):
    """Identifies a block among those of its owner: like units have blocks with the same keys.

    `adopted`: whether it was made outside the layers. `number` counts the owner's blocks by phase, as the first layer
    makes fewer than the others in a backward pass that ends there but as many afterwards, and by category, as decoding
    takes more workspace in some formats.
    """

    adopted: bool
    phase: str
    category: str
    number: int


class _RelativeEvent(NamedTuple):
    """An event relative to the unit it happens in: +1 or -1, and how many units away the block's owner is.

    `distance` is None for a block outside the layers.
    """

    sign: int
    distance: int | None
    key: _BlockKey
    bytes: int


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
        self._sizes, self._repeats = shortened.sizes, shortened.repeats
        self._order = [unit for run in shortened.runs for unit in run]
        self._copies: dict[int, list[int]] = {}
        for copy, unit in enumerate(self._order):
            self._copies.setdefault(unit, []).append(copy)
        self._run = {unit: sorted(set(run)) for run in shortened.runs for unit in run}
        self._mixed = {unit for run in shortened.runs if list(run) != sorted(run) for unit in run}
        self._owner = [None if block.layer is None else shortened.unit[block.layer] for block in trace.blocks]
        self._stretches = [
            (stretch, None if stretch.layer is None else shortened.unit[stretch.layer]) for stretch in trace.stretches
        ]
        # A unit also owns blocks that it frees but that are made outside the layers, such as its router's gradient.
        adopted = set()
        for stretch, freed_by in self._stretches:
            for event in stretch.events:
                if freed_by is not None and event < 0 and self._owner[-event - 1] is None:
                    self._owner[-event - 1] = freed_by
                    adopted.add(-event - 1)
        made_in = [stretch.phase for stretch in trace.stretches for event in stretch.events if event > 0]
        counts: Counter[tuple[int | None, bool, str, str]] = Counter()
        self._keys: list[_BlockKey] = []
        for number, (owner, phase, block) in enumerate(zip(self._owner, made_in, trace.blocks, strict=True)):
            kind = (number in adopted, phase, block.category)
            self._keys.append(_BlockKey(*kind, counts[owner, *kind]))
            counts[owner, *kind] += 1
        self._blocks: list[TracedBlock] = []
        self._numbers: dict[tuple[int | None, _BlockKey], int] = {}
        self._made: list[Stretch] = []

    def whole(self) -> Trace:
        for repeated, times in enumerate(self._repeats):
            if times > 1:
                self._check(repeated)
        earlier: int | None = None
        for units in self._passes():
            if None in units:
                for stretch in units[None]:
                    self._add(stretch)
                continue
            own = [unit for unit in units if unit is not None]
            copies = sorted(copy for unit in own for copy in self._copies[unit])
            falling = (own[0] if earlier is None or len(own) > 1 else earlier) > own[-1]
            for copy in reversed(copies) if falling else copies:
                for stretch in units[self._order[copy]]:
                    self._add(stretch, self._order[copy], copy)
            earlier = own[-1]
        return replace(self._trace, blocks=self._blocks, stretches=self._made)

    def _passes(self) -> Iterator[dict[int | None, list[Stretch]]]:
        """The stretches in order by unit: of one, of none, or of all in a pass through a run of several sizes."""
        passed: dict[int | None, list[Stretch]] = {}
        run: list[int | None] = []
        last: int | None = None
        for unit, group in itertools.groupby(self._stretches, key=lambda pair: pair[1]):
            if not passed:
                run = [unit] if unit is None or unit not in self._mixed else [*self._run[unit]]
                if unit not in (run[0], run[-1]):  # a pass turned at the end: that unit's part of both is one stretch
                    run = [other for other in run if other != last]
            passed[unit] = passed.get(unit, []) + [stretch for stretch, _ in group]
            if len(passed) == len(run):
                if list(passed) not in (run, run[::-1]):
                    raise NotAlike(f"units {run[0]} to {run[-1]} of the layers do not follow one another")
                yield passed
                passed, last = {}, unit
        if passed:
            raise NotAlike("a pass through the layers ends among them")

    def _check(self, unit: int) -> None:
        """Raise NotAlike unless `unit` and the next one did the same."""
        done, run = self._done_by(unit), self._run[unit]
        if done != self._done_by(unit + 1):
            raise NotAlike(f"units {unit} and {unit + 1} of the layers differ")
        # The last's neighbour below may free what the last alone has.
        for other in run[:-2]:
            if self._reaches(other, 1) != self._reaches(unit, 1):
                raise NotAlike(f"unit {other} of the layers frees what is above it, as unit {unit} does not")
        for other in run[1:-1]:
            if self._reaches(other, -1) != self._reaches(unit, -1):
                raise NotAlike(f"unit {other} of the layers frees what is below it, as unit {unit} does not")
        # The first and the last may come and go otherwise, but what stays with a layer is the same for all.
        like = [other for other in run if self._sizes[other] == self._sizes[unit]]
        kept: dict[int | None, dict[str, int]] = {other: {} for other in like}  # bytes by category
        for block, owner in zip(self._trace.blocks, self._owner, strict=True):
            if owner in kept and block.category in _LASTING:
                kept[owner][block.category] = kept[owner].get(block.category, 0) + block.bytes
        if any(own != kept[unit] for own in kept.values()):
            raise NotAlike(f"what units {like[0]} to {like[-1]} of the layers keep differs")
        distances = {event.distance for _, events in done for event in events}
        if distances - {-1, 0, 1}:
            raise NotAlike(f"unit {unit} of the layers reaches beyond its neighbours")

    def _reaches(self, unit: int, distance: int) -> Counter[tuple[str, _BlockKey]]:
        """The blocks of the unit above (1) or below (-1) that this one frees, by phase."""
        return Counter(
            (phase, event.key)
            for phase, events in self._done_by(unit)
            for event in events
            if event.distance == distance
        )

    def _done_by(self, unit: int) -> list[tuple[str, list[_RelativeEvent]]]:
        """The events of each stretch of a unit with their phase, expressed relative to the unit."""

        def relative(event: int) -> _RelativeEvent:
            number = abs(event) - 1
            block, owner = self._trace.blocks[number], self._owner[number]
            distance = None if owner is None else owner - unit
            return _RelativeEvent(1 if event > 0 else -1, distance, self._keys[number], block.bytes)

        return [
            (stretch.phase, [relative(event) for event in stretch.events])
            for stretch, owner in self._stretches
            if owner == unit
        ]

    def _add(self, stretch: Stretch, unit: int | None = None, copy: int = 0) -> None:
        """Add a stretch of `unit` as that of its copy number `copy`.

        Without a unit it is outside the layers: what it does to a unit's blocks is done to those of each copy.
        """
        made = Stretch(stretch.phase, None if unit is None else copy, work=stretch.work)
        for event in stretch.events:
            owner = self._owner[abs(event) - 1]
            if owner is None:
                made.events.append(self._event(event, None))
            elif unit is None:
                made.events += [self._event(event, each) for each in self._copies[owner]]
            elif abs(owner - unit) <= 1:
                made.events.append(self._event(event, copy + owner - unit))
            elif self._mixed & {unit, owner} or self._repeats[unit] > 1 or self._repeats[owner] > 1:
                raise NotAlike(f"unit {unit} of the layers reaches unit {owner}, which stands for several")
            else:
                made.events.append(self._event(event, self._copies[owner][0]))
        self._made.append(made)

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
