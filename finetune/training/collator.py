"""The rows of an optimizer step as its micro-batches, each padded to its own longest row, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.data.batching import MicroBatching, micro_batches

Inputs = dict[str, Any]
"""What the model is called with: tensors of ids and labels (rows, tokens), and the mask of what is no padding; packed
(1, tokens), with `position_ids` and `cu_seq_lens_q`, where each row begins and the last one ends."""


class MicroBatches:
    """Collates rows (`input_ids`, `labels`) into a list of micro-batches."""

    def __init__(self, way: MicroBatching, pad_token_id: int) -> None:
        self._way = way
        self._collate = DataCollatorForLanguageModeling(pad_token_id=pad_token_id, padding_free=way.packed)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Inputs]:
        parts = micro_batches([len(row["input_ids"]) for row in rows], self._way)
        return [self.micro_batch([rows[place] for place in part]) for part in parts]

    def micro_batch(self, rows: Sequence[dict[str, Any]]) -> Inputs:
        """These rows as one micro-batch."""
        found: Inputs = self._collate(list(rows))
        return found
