"""The training data as steps: the micro-batches of this rank for each step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from finetune.config import TrainingSection
from finetune.data.batching import RowOrder
from finetune.training.collator import Inputs, MicroBatches

COLUMNS = ["input_ids", "labels"]


@dataclass(frozen=True)
class Steps:
    """The steps of each epoch over `rows` (a data set), in the order that `order` deals them.

    A step's rows are one batch of the loader, which `collate` shares out among ranks and micro-batches. There are no
    loader workers: collating takes a hundredth of a step, and their random numbers would not survive a resume.
    """

    rows: Any
    order: RowOrder
    collate: MicroBatches
    batch_size: int
    pinned: bool

    @property
    def in_epoch(self) -> int:
        """Steps of an epoch, of which the last may have fewer rows."""
        return math.ceil(len(self.rows) / self.batch_size)

    def in_all(self, training: TrainingSection) -> int:
        """Steps of the whole job."""
        return training.max_steps or math.ceil(training.epochs * self.in_epoch)

    def epoch(self, number: int, done: int) -> Iterator[list[Inputs]]:
        """The steps of epoch `number`, from 0, but for the first `done`."""
        self.order.set_epoch(number)
        return iter(
            DataLoader(
                self.rows.select_columns(COLUMNS),
                batch_size=self.batch_size,
                sampler=list(itertools.islice(self.order, done * self.batch_size, None)),
                collate_fn=self.collate,
                pin_memory=self.pinned,
            )
        )
