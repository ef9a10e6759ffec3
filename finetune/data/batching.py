"""The order of rows: random, or grouped by length and still random; a function of seed and epoch alone.

And the largest batch that any such order can produce, which is what decides whether a job fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

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
class Batch:
    """The largest micro-batch: `rows` of `tokens` each, padding included.

    `padded`: whether some row is shorter than the longest, so that attention needs a mask. `trained_tokens`: places
    with a label, over all rows. `source` says where the lengths come from.
    """

    rows: int
    tokens: int
    padded: bool
    trained_tokens: int
    source: str = "data.max_length"

    def as_dict(self) -> dict[str, Any]:
        """The batch as JSON values."""
        return asdict(self)


def worst_batch(lengths: Sequence[int], trained: Sequence[int], micro_batch: int, source: str) -> Batch:
    """The largest micro-batch that some order of these rows produces.

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


def longest_batch(micro_batch: int, max_length: int) -> Batch:
    """The largest micro-batch where nothing is known of the rows but their limit."""
    return Batch(micro_batch, max_length, micro_batch > 1, micro_batch * (max_length - 1))
