"""The order of rows, the split of a step into micro-batches, and the largest micro-batch.

The order is random, or grouped by length and still random, and depends only on seed and epoch. A step is split by rows,
by tokens or packed, which does not change its gradient. The largest micro-batch that any order can produce decides
whether a job fits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.data import Sampler

from finetune.config import DataSection, TrainingSection

# Rows are sorted by length within windows of so many batches: long enough to pad little, short enough that the
# order of batches stays random (the value transformers' own grouping uses).
_WINDOW_BATCHES = 50


class RowOrder(Sampler[int]):
    """Indices of one epoch.

    With `group_by_length`, consecutive batches of `batch_size` rows have similar lengths: rows are shuffled, sorted
    by length within windows, and the batches of the window are shuffled again. Resuming needs no state but the
    epoch, and the order does not depend on the micro-batch.
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
    """How the rows of a step are shared out among its micro-batches.

    `rows` each; or with `tokens` as many rows as take no more than that, padded to the longest of them, or `packed`:
    one behind the other, with nothing between.
    """

    rows: int
    tokens: int | None = None
    packed: bool = False

    @classmethod
    def of(cls, training: TrainingSection, data: DataSection) -> MicroBatching:
        """As the config says, once its micro-batch is a number."""
        tokens = training.micro_batch_tokens
        if data.packing and not tokens:
            tokens = training.rows * data.max_length  # what that many rows take at most
        return cls(1 if tokens else training.rows, tokens, data.packing)

    def capacity(self, length: int) -> int:
        """How many rows of `length` tokens fit."""
        return max(1, self.tokens // length) if self.tokens else self.rows


def micro_batches(lengths: Sequence[int], way: MicroBatching) -> list[list[int]]:
    """The rows of one optimizer step, by their place in `lengths` (tokens of each), in micro-batches.

    By rows, they stay in their order; by tokens, those of similar length come together, the longest first; packed, each
    goes where it leaves the least room (best fit, the longest first). A row over the tokens is a micro-batch by itself.
    """
    if not way.tokens:
        return [list(range(at, min(at + way.rows, len(lengths)))) for at in range(0, len(lengths), way.rows)]
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if way.packed:
        return _best_fit(order, lengths, way.tokens)
    found = []
    while order:
        rows = way.capacity(lengths[order[0]])
        found.append(order[:rows])
        order = order[rows:]
    return found


def _best_fit(order: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    found: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, micro-batch), in order
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

    `padded`: whether some row is shorter than the longest. `trained_tokens`: places with a label, over all rows.
    `source` says where the lengths come from. `packed`: the lengths of the rows that a packed micro-batch, one row to
    the model, is made of.
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

    `step_rows` is the number of rows of a step in one process. Every order is possible in some epoch. By tokens there
    are two, where they differ: the one with the most tokens, padding included, and with no fewer trained tokens than
    any other has; and the one with the longest row.
    """
    if way.packed:
        return [_largest_packed(lengths, trained, way, step_rows, source)]
    if not way.tokens:
        return [worst_batch(lengths, trained, way.rows, source)]
    rows = sorted(zip(lengths, trained, strict=True))
    shapes: dict[int, tuple[int, int, int]] = {}
    best: list[int] = []  # the trained tokens of the rows with most of them, of as many as a micro-batch can have
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
        places, length, number = shape
        found = [count for _, count in rows[:number]]
        return worst_batch([length for length, _ in rows[:number]], found, places // length, source)

    worst = replace(batch(largest), trained_tokens=min(most_trained, largest[0]))
    return [worst] if largest == longest else [worst, batch(longest)]


def _largest_packed(
    lengths: Sequence[int], trained: Sequence[int], way: MicroBatching, step_rows: int, source: str
) -> Batch:
    """As many tokens as the rows of a step can make together within the limit, the longest rows among them."""
    assert way.tokens
    in_order = sorted(lengths, reverse=True)
    tokens = max(in_order[0], min(sum(in_order[:step_rows]), _largest_sum(in_order, way.tokens)))
    segments, left = [], tokens
    for length in in_order[:step_rows]:
        if left == 0:
            break
        segments.append(min(length, left))
        left -= segments[-1]
    # No more trained tokens than the densest rows have, the last one in part; the first token of a row has no label.
    most, left = 0, tokens
    for length, count in sorted(zip(lengths, trained, strict=True), key=lambda row: -row[1] / row[0]):
        taken = min(length, left)
        most += min(count, taken)
        left -= taken
    return Batch(1, tokens, False, min(most, tokens - 1), source, tuple(segments))


def _largest_sum(lengths: Sequence[int], limit: int) -> int:
    """The largest sum within `limit` that some of `lengths` make; 0 where none does. Bit n: the sum n can be made."""
    within, sums = (1 << (limit + 1)) - 1, 1
    for length in lengths:
        sums |= (sums << length) & within
        if sums >> limit:
            return limit
    return sums.bit_length() - 1


def worst_batch(lengths: Sequence[int], trained: Sequence[int], micro_batch: int, source: str) -> Batch:
    """The largest micro-batch of so many rows that some order of these rows produces.

    Every order is possible in some epoch, so it is the longest row among as many as there are, and no more trained
    tokens than the rows with most of them have. Rows of one length need no mask; two lengths may meet.
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
    """So many rows as long as rows may be; nothing else is known of them."""
    return Batch(rows, length, rows > 1, rows * (length - 1))


def longest_batches(way: MicroBatching, step_rows: int, max_length: int) -> list[Batch]:
    """The largest micro-batches where nothing is known of the rows but their limit."""
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
    """How many micro-batches a step of so many rows would be made of, if all were as `batch`."""
    rows = len(batch.packed) or (batch.rows if way.tokens else way.rows)
    return max(1, step_rows // rows)
