"""The order of rows, the split of a step into micro-batches, and the largest micro-batch.

The order is shuffled, optionally grouped by length, and depends only on seed and epoch. A step is split by rows, by
tokens or by packing; none of them changes its gradient. Whether a job fits in memory is decided by the largest
micro-batch that any order can produce.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.data import Sampler

from finetune.config import DataSection, TrainingSection

# Rows are sorted by length within windows of this many batches: large enough for little padding, small enough to keep
# the order of batches random. transformers' LengthGroupedSampler uses the same value.
_WINDOW_BATCHES = 50


class RowOrder(Sampler[int]):
    """Row indices of one epoch.

    With `group_by_length`, each batch of `batch_size` rows has similar lengths: rows are shuffled, sorted by length
    within windows, and the batches of each window are shuffled again. Resuming needs only the epoch, and the order
    does not depend on the micro-batch size.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, group_by_length: bool) -> None:
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        if not self.group_by_length:
            return iter(order)
        return iter([index for batch in self._grouped(order, generator) for index in batch])

    def _grouped(self, order: list[int], generator: torch.Generator) -> Iterator[list[int]]:
        window = self.batch_size * _WINDOW_BATCHES
        for start in range(0, len(order), window):
            rows = sorted(order[start : start + window], key=self.lengths.__getitem__)
            batches = [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
            # A short batch must stay last, or every later batch would straddle two length groups.
            full = [batch for batch in batches if len(batch) == self.batch_size]
            for place in torch.randperm(len(full), generator=generator).tolist():
                yield full[place]
            yield from batches[len(full) :]


@dataclass(frozen=True)
class MicroBatching:
    """How the rows of a step are divided into micro-batches.

    `rows` rows each; or, with `tokens`, as many rows as fit into that many tokens, either padded to the longest of them
    or `packed`, that is, concatenated without padding.
    """

    rows: int
    tokens: int | None = None
    packed: bool = False

    @classmethod
    def of(cls, training: TrainingSection, data: DataSection) -> MicroBatching:
        """As configured, once `training.micro_batch` is a number rather than `auto`."""
        tokens = training.micro_batch_tokens
        if data.packing and not tokens:
            tokens = training.rows * data.max_length  # the most that many rows can take
        return cls(1 if tokens else training.rows, tokens, data.packing)

    def capacity(self, length: int) -> int:
        """Rows of `length` tokens that fit into one micro-batch."""
        return max(1, self.tokens // length) if self.tokens else self.rows


def micro_batches(lengths: Sequence[int], way: MicroBatching) -> list[list[int]]:
    """Micro-batches of one optimizer step, as lists of indices into `lengths` (tokens per row).

    Rows of similar length are together, so that little is padded: by rows the shortest first, by tokens the longest.
    Packing is best-fit decreasing. A row longer than the token budget forms a micro-batch of its own.
    """
    if not way.tokens:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        return [order[at : at + way.rows] for at in range(0, len(order), way.rows)]
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if way.packed:
        return _best_fit(order, lengths, way.tokens)
    found = []
    while order:
        rows = way.capacity(lengths[order[0]])
        found.append(order[:rows])
        order = order[rows:]
    return found


def epoch(lengths: Sequence[int], order: Iterable[int], batch_size: int, way: MicroBatching) -> Iterator[list[int]]:
    """The lengths of the rows of each micro-batch of an epoch, as a single process trains them."""
    rows = [lengths[row] for row in order]
    for at in range(0, len(rows), batch_size):
        step = rows[at : at + batch_size]
        for part in micro_batches(step, way):
            yield [step[row] for row in part]


def _best_fit(order: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    found: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, micro-batch), sorted
    for row in order:
        at = bisect_left(room, (lengths[row], -1))
        left, number = room.pop(at) if at < len(room) else (tokens, len(found))
        if number == len(found):
            found.append([])
        found[number].append(row)
        if left > lengths[row]:
            insort(room, (left - lengths[row], number))
    return found


@dataclass(frozen=True)
class Batch:
    """The largest micro-batch: `rows` of `tokens` each, padding included.

    `padded`: whether some row is shorter than the longest. `trained_tokens`: labelled positions in all rows. `source`:
    where the lengths come from. `packed`: the lengths of the rows in a packed micro-batch, which the model sees as one.
    """

    rows: int
    tokens: int
    padded: bool
    trained_tokens: int
    source: str = "data.max_length"
    packed: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The batch as JSON values."""
        return asdict(self)


def worst_batches(
    lengths: Sequence[int], trained: Sequence[int], way: MicroBatching, step_rows: int, source: str
) -> list[Batch]:
    """The largest micro-batches that some order of these rows produces; one of them takes the most memory.

    `step_rows` is the number of rows per step and process. Every order can occur in some epoch. When batching by
    tokens there are up to two: the one with the most tokens, padding included, and at least as many trained tokens as
    any other; and the one with the longest row.
    """
    if way.packed:
        return [_largest_packed(lengths, trained, way, step_rows, source)]
    if not way.tokens:
        return [worst_batch(lengths, trained, way.rows, source)]
    rows = sorted(zip(lengths, trained, strict=True))
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

    def batch(shape: tuple[int, int, int]) -> Batch:
        positions, length, number = shape
        found = [count for _, count in rows[:number]]
        return worst_batch([length for length, _ in rows[:number]], found, positions // length, source)

    worst = replace(batch(largest), trained_tokens=min(most_trained, largest[0]))
    return [worst] if largest == longest else [worst, batch(longest)]


def no_longer(
    most_tokens: int | None, lengths: Sequence[int], trained: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Lengths and trained tokens of the rows of at most `most_tokens`, if there are any, else of the shortest."""
    if most_tokens is None:
        return lengths, trained
    bound = max(most_tokens, min(lengths))
    rows = [row for row in zip(lengths, trained, strict=True) if row[0] <= bound]
    return [length for length, _ in rows], [count for _, count in rows]


def _largest_packed(
    lengths: Sequence[int], trained: Sequence[int], way: MicroBatching, step_rows: int, source: str
) -> Batch:
    """The most tokens that the rows of a step can fill within the limit, made up of the longest rows."""
    assert way.tokens
    in_order = sorted(lengths, reverse=True)
    tokens = max(in_order[0], min(sum(in_order[:step_rows]), _largest_sum(in_order, way.tokens)))
    segments, left = [], tokens
    for length in in_order[:step_rows]:
        if left == 0:
            break
        segments.append(min(length, left))
        left -= segments[-1]
    # An upper bound on trained tokens: the densest rows, the last one in part. The first token of a row has no label.
    most, left = 0, tokens
    for length, count in sorted(zip(lengths, trained, strict=True), key=lambda row: -row[1] / row[0]):
        taken = min(length, left)
        most += min(count, taken)
        left -= taken
    return Batch(1, tokens, False, min(most, tokens - 1), source, tuple(segments))


def _largest_sum(lengths: Sequence[int], limit: int) -> int:
    """The largest subset sum of `lengths` within `limit`, or 0. Bit n of `sums` is set if some subset sums to n."""
    within, sums = (1 << (limit + 1)) - 1, 1
    for length in lengths:
        sums |= (sums << length) & within
        if sums >> limit:
            return limit
    return sums.bit_length() - 1


def worst_batch(lengths: Sequence[int], trained: Sequence[int], micro_batch: int, source: str) -> Batch:
    """The largest micro-batch of `micro_batch` rows that some order of these rows produces.

    Every order can occur in some epoch, so it is padded to the longest row, and its trained tokens are at most those of
    the rows with the most. Rows of equal length need no attention mask; different lengths may end up together.
    """
    rows = min(micro_batch, len(lengths))
    return Batch(
        rows=rows,
        tokens=max(lengths),
        padded=rows > 1 and len(set(lengths)) > 1,
        trained_tokens=sum(sorted(trained)[-rows:]),
        source=source,
    )


def longest_batch(rows: int, length: int) -> Batch:
    """`rows` rows of `length` tokens with every label trained: the upper bound when nothing else is known."""
    return Batch(rows, length, rows > 1, rows * (length - 1))


def longest_batches(way: MicroBatching, step_rows: int, max_length: int) -> list[Batch]:
    """The largest micro-batches when only the maximum length of the rows is known."""
    if way.packed:
        tokens = min(max(max_length, way.tokens or 0), step_rows * max_length)
        whole, rest = divmod(tokens, max_length)
        lengths = (max_length,) * whole + (rest,) * (rest > 0)
        return [Batch(1, tokens, False, tokens - len(lengths), packed=lengths)]
    if not way.tokens:
        return [longest_batch(way.rows, max_length)]
    sizes = {length: min(way.capacity(length), step_rows) for length in range(1, max_length + 1)}
    most = max(sizes, key=lambda length: (sizes[length] * length, length))
    return [longest_batch(sizes[length], length) for length in dict.fromkeys((most, max_length))]


def per_step(step_rows: int, way: MicroBatching, batch: Batch) -> int:
    """Micro-batches per step of `step_rows` rows, if all were like `batch`."""
    rows = len(batch.packed) or (batch.rows if way.tokens else way.rows)
    return max(1, step_rows // rows)
