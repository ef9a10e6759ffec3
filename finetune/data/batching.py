"""The order of rows, the split of a step into micro-batches, and the largest micro-batch.

The order is shuffled, optionally grouped by length, and depends only on seed and epoch. A step is split by rows, by
tokens or by packing; none of them changes its gradient. Whether a job fits in memory is decided by the largest
micro-batch that any order can produce.

The area of a row's images is measured in their tokens, each of which stands for as many pixels. Rows of like area are
put together as well as rows of like length; a limit of tokens is one of area, as a row's tokens include its images'.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from finetune.config import DataSection, TrainingSection
from finetune.data.encoded import MEDIA_SIZES, ONE_SEQUENCE, RowLayout

# Rows are sorted by length within windows of this many batches: large enough for little padding, small enough to keep
# the order of batches random. transformers' LengthGroupedSampler uses the same value.
_WINDOW_BATCHES = 50

Order = Literal["length", "share", "keys", "area"]
"""The rows of a largest micro-batch, by length, by the share of their tokens that segments share, by keys: positions
that attention sees, or by the area of their images. By length, the area decides about all but the longest row.
"""

_BY_SHARED: tuple[Order, ...] = ("share", "keys")

# A micro-batch of the rows with the most keys is considered only if it has more than this many times the keys of the
# longest rows.
_MORE_KEYS = 1.01


class RowOrder:
    """Row indices of one epoch.

    With `group_by_length`, each batch of `batch_size` rows has similar lengths, and images of similar `areas`: rows are
    shuffled, sorted within windows, and the batches of each window are shuffled again. Resuming needs only the epoch,
    and the order does not depend on the micro-batch size.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, seed: int, group_by_length: bool, areas: Sequence[int] = ()
    ) -> None:  # fmt: skip
        self.lengths = list(lengths)
        self.areas = list(areas)
        self.batch_size = batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = np.random.RandomState((self.seed * 1_000_003 + self.epoch) % 2**32)
        order = _shuffled(len(self.lengths), generator)
        if not self.group_by_length:
            return iter(order)
        grouped: list[int] = []
        window = self.batch_size * _WINDOW_BATCHES
        for start in range(0, len(order), window):
            rows = sorted(order[start : start + window], key=_likeness(self.lengths, self.areas))
            batches = [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
            # A short batch must stay last, or every later batch would straddle two length groups.
            full = [batch for batch in batches if len(batch) == self.batch_size]
            for number in _shuffled(len(full), generator):
                grouped += full[number]
            grouped += itertools.chain.from_iterable(batches[len(full) :])
        return iter(grouped)


def _shuffled(count: int, generator: np.random.RandomState) -> list[int]:
    """The numbers below `count` in the order of `torch.randperm`, without importing torch.

    Both draw 32-bit numbers of MT19937, one for each number but the last, to swap it with itself or a later one (torch
    2.13, aten/src/ATen/native/TensorFactories.cpp, randperm_cpu).
    """
    numbers = list(range(count))
    draws = np.frombuffer(generator.bytes(4 * max(count - 1, 0)), "<u4")
    for at, draw in enumerate((draws % np.arange(count, 1, -1, dtype=np.uint32)).tolist()):
        numbers[at], numbers[at + draw] = numbers[at + draw], numbers[at]
    return numbers


@dataclass(frozen=True)
class MicroBatching:
    """The way in which the rows of a step are divided into micro-batches.

    `rows` rows each; or, with `tokens`, as many rows as fit into that many tokens, either padded to the longest of them
    or `packed`, that is, concatenated without padding. `layout` is that of the rows, whose segments stay together. With
    `shares`, packed segments of a row have the tokens that they share computed once, in the first of them.
    """

    rows: int
    tokens: int | None = None
    packed: bool = False
    layout: RowLayout = ONE_SEQUENCE
    shares: bool = False

    @classmethod
    def of(
        cls, training: TrainingSection, data: DataSection, layout: RowLayout = ONE_SEQUENCE, *, shares: bool = False
    ) -> MicroBatching:
        """The configured way; `training.micro_batch` must be a number, not `auto`."""
        tokens = training.micro_batch_tokens
        if data.packing and not tokens:
            tokens = training.rows * layout.together * data.max_length  # the most that many rows can take
        return cls(1 if tokens else training.rows, tokens, data.packing, layout, shares)

    def capacity(self, length: int) -> int:
        """Rows that fit into one micro-batch, each padded to `length` tokens a segment."""
        return max(1, self.tokens // (length * self.layout.together)) if self.tokens else self.rows

    def length(self, segments: Sequence[int], shared: int = 0) -> int:
        """The tokens by which a row with segments of these lengths is batched: of all if packed, else of the longest.

        Of two that go through the model apart it is the longer one, so that either pass is within the limit.
        """
        return sum(self.computed(segments, shared)) if self.packed and not self.layout.apart else max(segments)

    def computed(self, segments: Sequence[int], shared: int) -> tuple[int, ...]:
        """Tokens to compute in each segment of a row whose segments begin with `shared` equal ones."""
        first, *others = segments
        return (first, *(length - shared * self.shares for length in others))

    def shared(self, row: Mapping[str, Any]) -> int:
        """The number of tokens of a prepared row that its first segment computes for all segments."""
        return int(row.get("shared", 0)) if self.shares else 0


@dataclass(frozen=True)
class Sizes:
    """Tokens of each row: the `lengths` by which rows are batched, how many are `trained`, and those of its `segments`
    that are computed, if a pass has several of a row; how many are `shared`, if segments share any. `images` are the
    height, width and tokens of a row's images, one after the other, if rows may have some.
    """

    lengths: Sequence[int]
    trained: Sequence[int]
    segments: Sequence[Sequence[int]] = ()
    shared: Sequence[int] = ()
    images: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, rows: Any, way: MicroBatching) -> Sizes:
        """The sizes of the rows of a prepared split."""
        if not way.layout.segments:
            there = MEDIA_SIZES in getattr(rows, "column_names", ())
            return cls(rows["length"][:], rows["trained"][:], images=rows[MEDIA_SIZES][:] if there else ())
        segments, shared = rows["segments"][:], rows["shared"][:]
        lengths = [*map(way.length, segments, shared)]
        computed = [*map(way.computed, segments, shared)] if way.layout.together > 1 else ()
        return cls(lengths, rows["trained"][:], computed, shared if way.shares else ())

    def no_longer(self, most_tokens: int | None) -> Sizes:
        """The sizes of the rows of at most `most_tokens`, if there are any, else of the shortest."""
        if most_tokens is None:
            return self
        bound = max(most_tokens, min(self.lengths))
        return self.some([row for row, length in enumerate(self.lengths) if length <= bound])

    def some(self, rows: Sequence[int]) -> Sizes:
        """The sizes of these rows."""

        def of(values: Sequence[Any]) -> Sequence[Any]:
            return [values[row] for row in rows] if values else ()

        return Sizes(of(self.lengths), of(self.trained), of(self.segments), of(self.shared), of(self.images))

    @property
    def areas(self) -> list[int]:
        """The area of each row's images; none where rows have no images."""
        return [*map(area, self.images)]

    @property
    def uneven(self) -> bool:
        """Whether sequences differ in length."""
        return len(set(itertools.chain.from_iterable(self.segments) if self.segments else self.lengths)) > 1


def area(seen: Sequence[int]) -> int:
    """The area of a row's images, in tokens: every third number of `encoded.MEDIA_SIZES`."""
    return sum(seen[2::3])


def _likeness(lengths: Sequence[int], areas: Sequence[int]) -> Callable[[int], Any]:
    """The key of a row to sort by: areas of the same power of two are alike, and of these the lengths decide."""
    return (lambda row: (areas[row].bit_length(), lengths[row])) if areas else lengths.__getitem__


def micro_batches(lengths: Sequence[int], way: MicroBatching, areas: Sequence[int] = ()) -> list[list[int]]:
    """Micro-batches of one optimizer step, as lists of indices into `lengths` (tokens per row).

    Rows of similar length, and of images of similar `areas`, are together, so that little is padded: by rows the
    smallest first, by tokens the largest. Packing is best-fit decreasing. A row longer than the token budget forms a
    micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=_likeness(lengths, areas), reverse=bool(way.tokens))
    if not way.tokens:
        return [order[at : at + way.rows] for at in range(0, len(order), way.rows)]
    parts: list[list[int]] = []
    if way.packed:
        room: list[tuple[int, int]] = []  # (tokens left, micro-batch), sorted
        for row in order:
            at = bisect_left(room, (lengths[row], -1))
            left, number = room.pop(at) if at < len(room) else (way.tokens, len(parts))
            if number == len(parts):
                parts.append([])
            parts[number].append(row)
            if left > lengths[row]:
                insort(room, (left - lengths[row], number))
        return parts
    longest = 0
    for row in order:
        longest = max(longest, lengths[row])
        if not parts or len(parts[-1]) >= way.capacity(longest):
            parts.append([])
            longest = lengths[row]
        parts[-1].append(row)
    return parts


def epoch(
    lengths: Sequence[int], order: Iterable[int], batch_size: int, way: MicroBatching, areas: Sequence[int] = ()
) -> Iterator[list[int]]:  # fmt: skip
    """The lengths of the rows of each micro-batch of an epoch, as a single process trains them."""
    rows = list(order)
    for at in range(0, len(rows), batch_size):
        step = rows[at : at + batch_size]
        own = [lengths[row] for row in step]
        for part in micro_batches(own, way, [areas[row] for row in step] if areas else ()):
            yield [own[row] for row in part]


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batch of a pass: `rows` of `segments` sequences of `tokens` each, padding included.

    `padded`: whether some sequence is shorter than the longest. `trained_tokens`: labelled positions in all rows.
    `source`: where the lengths come from. `packed`: the lengths of the sequences in a packed micro-batch, which the
    model sees as one. `shared`: how many tokens the sequences of each row share, which its first one has. `order`: by
    which its rows are the first ones. `images`: `encoded.MEDIA_SIZES` of each row.
    """

    rows: int
    tokens: int
    padded: bool
    trained_tokens: int
    source: str = "data.max_length"
    packed: tuple[int, ...] = ()
    segments: int = 1
    shared: tuple[int, ...] = ()
    order: Order = "length"
    images: tuple[tuple[int, ...], ...] = ()

    @property
    def area(self) -> int:
        """The area of all images, in tokens."""
        return sum(map(area, self.images))

    @property
    def keys(self) -> int:
        """Positions that attention sees, those that sequences share counted for each."""
        return self.positions + sum(self.shared) * (self.segments - 1)

    @property
    def positions(self) -> int:
        """Tokens of all sequences, padding included."""
        return self.tokens if self.packed else self.rows * self.segments * self.tokens

    @property
    def shared_by_row(self) -> tuple[int, ...]:
        """The number of tokens that the segments of each row share."""
        return self.shared or (0,) * len(self.by_row)

    @property
    def by_row(self) -> list[tuple[int, ...]]:
        """Tokens of the segments of each row, padding included."""
        sequences = self.packed or (self.tokens,) * (self.rows * self.segments)
        return [sequences[at : at + self.segments] for at in range(0, len(sequences), self.segments)]

    def as_dict(self) -> dict[str, Any]:
        """The batch as JSON values; `segments` only where rows have several, `shared` where these share tokens, and
        `images` where rows have some.
        """
        left_out = {
            "segments": self.segments == 1, "shared": not self.shared, "order": True, "images": not self.images
        }  # fmt: skip
        return {name: value for name, value in asdict(self).items() if not left_out.get(name)}


def worst_batches(sizes: Sizes, way: MicroBatching, step_rows: int, source: str) -> list[LargestBatch]:
    """The largest micro-batches that some order of these rows produces; one of them takes the most memory.

    `step_rows` is the number of rows per step and process. Every order can occur in some epoch. When batching by
    tokens there are up to two: the one with the most tokens, padding included, and at least as many trained tokens as
    any other; and the one with the longest row or, if packed rows share tokens, the one with the most keys, as shared
    ones are kept once more for attention. If rows have images there is another one, of the largest area.
    """
    if way.packed:
        longest = _largest_packed(sizes, way, step_rows, source)
        if not sizes.shared:
            return [longest]
        # The first where tokens run out, the second where the rows of a step do.
        others = (_largest_packed(sizes, way, step_rows, source, order) for order in _BY_SHARED)
        densest = max(others, key=lambda batch: batch.keys)
        return [longest, densest] if densest.keys > longest.keys * _MORE_KEYS else [longest]
    if way.tokens:
        batches = _largest_by_tokens(sizes, way, step_rows, source)
    else:
        batches = [_worst_batch(sizes, way.rows, way.layout.together, source)]
    if not any(sizes.areas):
        return batches
    batches = [_with_images(sizes, batch) for batch in batches]
    largest = _largest_by_area(sizes, way, step_rows, source)
    return batches if replace(largest, order="length") in batches else [*batches, largest]


def _with_images(sizes: Sizes, batch: LargestBatch) -> LargestBatch:
    return replace(batch, images=tuple(tuple(sizes.images[row]) for row in chosen_rows(sizes, batch)))


def with_most_images(sizes: Sizes, batch: LargestBatch) -> LargestBatch:
    """`batch` of longer rows than these, with the images of the rows with the largest ones; images are not trained."""
    shown = _with_images(sizes, replace(batch, order="area"))
    others = ((),) * (batch.rows - len(shown.images))
    return replace(batch, images=(*shown.images, *others), trained_tokens=batch.trained_tokens - shown.area)


def _largest_by_area(sizes: Sizes, way: MicroBatching, step_rows: int, source: str) -> LargestBatch:
    """The micro-batch with the largest area of images that some order of these rows produces."""
    areas, most = sizes.areas, (0, 0, 0)
    best: list[int] = []  # the largest areas, for as many rows as a micro-batch can hold
    for length, each in sorted(zip(sizes.lengths, areas, strict=True)):
        heapq.heappush(best, each)
        while len(best) > min(way.capacity(length), step_rows):
            heapq.heappop(best)
        most = max(most, (sum(best), length, len(best)))
    _, length, rows = most
    within = sizes.no_longer(length)
    own = within.some(first_rows(within, "area")[:rows])
    return _with_images(sizes, replace(_worst_batch(own, rows, way.layout.together, source), order="area"))


def _largest_by_tokens(sizes: Sizes, way: MicroBatching, step_rows: int, source: str) -> list[LargestBatch]:
    order = sorted(range(len(sizes.lengths)), key=lambda row: (sizes.lengths[row], sizes.trained[row]))
    rows = [(sizes.lengths[row], sizes.trained[row]) for row in order]
    shapes: dict[int, tuple[int, int, int]] = {}
    best: list[int] = []  # the largest counts of trained tokens, for as many rows as a micro-batch can hold
    most_trained = 0
    for number, (length, count) in enumerate(rows, start=1):
        at_most = min(way.capacity(length), step_rows)
        heapq.heappush(best, count)
        while len(best) > at_most:
            heapq.heappop(best)
        most_trained = max(most_trained, sum(best))
        shapes[length] = (len(best) * length, length, number)
    largest, longest = max(shapes.values()), shapes[rows[-1][0]]

    def batch(shape: tuple[int, int, int]) -> LargestBatch:
        positions, length, number = shape
        return _worst_batch(sizes.some(order[:number]), positions // length, way.layout.together, source)

    worst = batch(largest)
    worst = replace(worst, trained_tokens=min(most_trained, worst.positions))
    return [worst] if largest == longest else [worst, batch(longest)]


def _largest_packed(
    sizes: Sizes, way: MicroBatching, step_rows: int, source: str, order: Order = "length"
) -> LargestBatch:  # fmt: skip
    """The most tokens that the rows of a step can fill within the limit, made up of the first rows in this order, as
    far as they go.
    """
    assert way.tokens
    in_order = sorted(sizes.lengths, reverse=True)
    # The largest sum of any rows within the limit: bit n of `sums` is set if some of them add up to n.
    within, sums = (1 << (way.tokens + 1)) - 1, 1
    for length in in_order:
        sums |= (sums << length) & within
        if sums >> way.tokens:
            break
    tokens = max(in_order[0], min(sum(in_order[:step_rows]), sums.bit_length() - 1))
    sequences: list[int] = []
    shared: list[int] = []
    left = tokens
    for row in first_rows(sizes, order)[:step_rows]:
        if left == 0:
            break
        rest = left - sizes.lengths[row]
        too_few = 0 < rest < way.layout.together  # less than one token for each segment of the next row
        own = sizes.segments[row] if sizes.segments else (sizes.lengths[row],)
        cut = _cut_to(own, left - way.layout.together if too_few else left)
        sequences += cut
        shared += [min(sizes.shared[row], cut[0])] if sizes.shared else []
        left = tokens - sum(sequences)
    # An upper bound on trained tokens: the densest rows, the last one in part. The first token of a row has no label.
    tokens = sum(sequences)
    most, left = 0, tokens
    for length, count in sorted(zip(sizes.lengths, sizes.trained, strict=True), key=lambda row: -row[1] / row[0]):
        taken = min(length, left)
        most += min(count, taken)
        left -= taken
    return LargestBatch(
        1, tokens, False, min(most, tokens - 1), source, tuple(sequences), way.layout.together, tuple(shared), order,
    )  # fmt: skip


def _cut_to(segments: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The lengths of a row's segments if it is cut to `tokens`: from its end, but to no less than a token each."""
    kept: list[int] = []
    for after, length in zip(reversed(range(len(segments))), segments, strict=True):
        kept.append(min(length, tokens - sum(kept) - after))
    return tuple(kept)


def first_rows(sizes: Sizes, order: Order) -> list[int]:
    """Row indices by `order`, the largest first; of equal rows, the first."""
    if order in ("length", "area"):
        by_length, areas = longest_first(sizes.lengths), sizes.areas
        kept = [] if order == "area" else by_length[:1]
        return kept + sorted(by_length[len(kept) :], key=lambda row: -areas[row]) if areas else by_length
    if order == "share":
        return sorted(range(len(sizes.lengths)), key=lambda row: -sizes.shared[row] / sizes.lengths[row])
    return longest_first(
        [
            length + shared * (len(segments) - 1)
            for length, shared, segments in zip(sizes.lengths, sizes.shared, sizes.segments, strict=True)
        ]
    )


def chosen_rows(sizes: Sizes, batch: LargestBatch) -> list[int]:
    """Indices of the rows that form a micro-batch of this shape, in its order."""
    every = batch.order not in ("length", "area")
    within = [row for row, length in enumerate(sizes.lengths) if every or length <= batch.tokens]
    return [within[row] for row in first_rows(sizes.some(within), batch.order)[: len(batch.by_row)]]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Row indices, the longest first; of equal rows, the first."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def _worst_batch(sizes: Sizes, micro_batch: int, segments: int, source: str) -> LargestBatch:
    """The largest micro-batch of `micro_batch` rows that some order of these rows produces.

    Every order can occur in some epoch, so it is padded to the longest row, and its trained tokens are at most those of
    the rows with the most. Rows of equal length need no attention mask; different lengths may end up together.
    """
    rows = min(micro_batch, len(sizes.lengths))
    return LargestBatch(
        rows=rows,
        tokens=max(sizes.lengths),
        padded=rows * segments > 1 and sizes.uneven,
        trained_tokens=sum(sorted(sizes.trained)[-rows:]),
        source=source,
        segments=segments,
    )


def whole_batch(sizes: Sizes, way: MicroBatching, source: str) -> LargestBatch:
    """The micro-batch of all these rows."""
    segments = way.layout.together
    if not way.packed:
        return _worst_batch(sizes, len(sizes.lengths), segments, source)
    sequences = tuple(itertools.chain.from_iterable(sizes.segments)) or tuple(sizes.lengths)
    return LargestBatch(1, sum(sequences), False, sum(sizes.trained), source, sequences, segments, tuple(sizes.shared))


def longest_batch(rows: int, length: int, segments: int = 1) -> LargestBatch:
    """Rows with segments of `length` tokens and every label trained: the upper bound when nothing else is known."""
    return LargestBatch(rows, length, rows * segments > 1, rows * segments * (length - 1), segments=segments)


def longest_batches(way: MicroBatching, step_rows: int, max_length: int) -> list[LargestBatch]:
    """The largest micro-batches when only the maximum length of the rows is known.

    Where packed rows share tokens there are two: rows that share none, and those that share all but one of a segment,
    of which attention sees the most keys.
    """
    segments = way.layout.together
    if way.packed:
        row = segments * max_length
        tokens = min(max(row, way.tokens or 0), step_rows * row)
        whole, rest = divmod(tokens, row)
        lengths = (max_length,) * (segments * whole)
        lengths += _cut_to((max_length,) * segments, rest) if rest >= segments else ()
        longest = LargestBatch(1, sum(lengths), False, sum(lengths) - len(lengths), packed=lengths, segments=segments)
        if not way.shares:
            return [longest]
        computed = (max_length, *(1,) * (segments - 1))
        rows = min(step_rows, max(1, tokens // sum(computed)))
        alike = LargestBatch(
            1, rows * sum(computed), False, rows * segments, packed=computed * rows, segments=segments,
            shared=(max_length - 1,) * rows, order="keys",
        )  # fmt: skip
        return [longest, alike]
    if not way.tokens:
        return [longest_batch(way.rows, max_length, segments)]
    sizes = {length: min(way.capacity(length), step_rows) for length in range(1, max_length + 1)}
    most = max(sizes, key=lambda length: (sizes[length] * length, length))
    return [longest_batch(sizes[length], length, segments) for length in dict.fromkeys((most, max_length))]


def per_step(step_rows: int, way: MicroBatching, batch: LargestBatch) -> int:
    """Micro-batches per step of `step_rows` rows, if all were like `batch`."""
    rows = len(batch.by_row) if way.tokens else way.rows
    return max(1, step_rows // rows)
