"""The source of a run's optimizer steps, and prepared rows as one: this rank's micro-batches for each step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from finetune.data.batching import RowOrder
from finetune.data.encoded import MEDIA, columns
from finetune.runtime import ranks
from finetune.training import largest_batch
from finetune.training.collator import Inputs, StepCollator
from finetune.training.largest_batch import LargestStep


class StepSource(Protocol):
    """Where the optimizer steps of a run come from: prepared rows, or what takes their place, such as rollouts.

    A step is this rank's micro-batches, of the layout of the objective. All ranks get equally many for each step
    (`StepCollator.idle` fills up), and call a source's methods together. A source has no state that a checkpoint would
    have to hold: a run goes on by asking for the steps of an epoch after those that it has done.
    """

    @property
    def in_epoch(self) -> int:
        """Steps per epoch."""

    def epoch(self, number: int, done: int) -> Iterator[list[Inputs]]:
        """The steps of epoch `number` (from 0) after the first `done`."""

    def largest(self, most_tokens: int | None = None) -> Iterator[LargestStep]:
        """The steps that need most memory, for the warm-up; of sequences of at most `most_tokens`, if given."""


@dataclass(frozen=True)
class PreparedRows:
    """The source that repeats `rows` (a data set) in each epoch, sampled by `order`.

    The rows of a step are one batch of the loader, which `collate` divides among ranks and micro-batches. There are no
    loader workers: their random state could not be resumed. With `on_card` a thread prepares each step in pinned
    memory while the GPU computes the previous one; on a CPU it would compete for the cores.
    """

    rows: Any
    order: RowOrder
    collate: StepCollator
    batch_size: int
    on_card: bool

    @property
    def in_epoch(self) -> int:
        """Steps per epoch; the last one may have fewer rows."""
        return math.ceil(len(self.rows) / self.batch_size)

    def epoch(self, number: int, done: int) -> Iterator[list[Inputs]]:
        self.order.set_epoch(number)
        loader = DataLoader(
            self.rows.select_columns(columns(self.rows)),
            batch_size=self.batch_size,
            sampler=list(itertools.islice(self.order, done * self.batch_size, None)),
            collate_fn=self.collate,
            pin_memory=self.on_card,
        )
        return agreed(one_ahead(iter(loader)) if self.on_card else iter(loader), self.rows)

    def largest(self, most_tokens: int | None = None) -> Iterator[LargestStep]:
        return largest_batch.largest_steps(self.rows, self.collate, self.batch_size, most_tokens)


def one_ahead(steps: Iterator[list[Inputs]]) -> Iterator[list[Inputs]]:
    """Prefetch one step: each is prepared in a thread while the previous one is used."""
    with ThreadPoolExecutor(1, "batches") as worker:
        coming = worker.submit(next, steps, None)
        while (ready := coming.result()) is not None:
            coming = worker.submit(next, steps, None)
            yield ready


def agreed(steps: Iterator[list[Inputs]], rows: Any) -> Iterator[list[Inputs]]:
    """The steps of `rows`; if those of one rank cannot be made, all raise its error, with nothing of the step begun.

    Only rows with images are read from anywhere but memory.
    """
    if MEDIA not in rows.column_names or ranks.world_size() == 1:
        yield from steps
        return
    while True:
        with ranks.agreeing():
            ready = next(steps, None)
        if ready is None:
            return
        yield ready
