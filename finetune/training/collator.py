"""The rows of an optimizer step as its micro-batches, each padded to its own longest row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.config import TrainingSection
from finetune.data.batching import micro_batches

Inputs = dict[str, torch.Tensor]


class MicroBatches:
    """Collates rows (`input_ids`, `labels`) into a list of micro-batches: ids, labels and mask, (rows, tokens) each."""

    def __init__(self, training: TrainingSection, pad_token_id: int) -> None:
        self._training = training
        self._pad = DataCollatorForLanguageModeling(pad_token_id=pad_token_id)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Inputs]:
        parts = micro_batches([len(row["input_ids"]) for row in rows], self._training)
        return [self._pad([rows[place] for place in part]) for part in parts]


def split(inputs: Inputs) -> tuple[Inputs, Inputs] | None:
    """The rows of a micro-batch as two smaller ones, each padded to its own longest row; None for a single row."""
    rows = len(inputs["input_ids"])
    if rows == 1:
        return None
    half = (rows + 1) // 2
    return _rows(inputs, slice(half)), _rows(inputs, slice(half, rows))


def _rows(inputs: Inputs, chosen: slice) -> Inputs:
    tokens = int(inputs["attention_mask"][chosen].sum(dim=1).max())
    return {name: tensor[chosen, :tokens] for name, tensor in inputs.items()}
