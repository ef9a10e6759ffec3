"""The order of rows: random, or grouped by length and still random; a function of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
