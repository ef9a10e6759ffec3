"""Split the rows of an optimizer step into micro-batches, each padded to its longest row, or packed.

Each rank takes its share of the rows; together they take the rows that a single process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.data.batching import MicroBatching, micro_batches

Inputs = dict[str, Any]
"""A micro-batch: tensors of ids and labels (rows, tokens), and the mask of what is no padding; packed (1, tokens), with
`position_ids` and `cu_seq_lens_q`, where each row begins and the last one ends."""


class Idle(Inputs):
    """A micro-batch that trains nothing, for a process whose share of a step makes fewer than another's."""


class MicroBatches:
    """Collates this process's share of rows (`input_ids`, `labels`) into a list of micro-batches."""

    def __init__(self, way: MicroBatching, pad_token_id: int, process: int = 0, processes: int = 1) -> None:
        self.way = way
        self._process, self._processes = process, processes
        self._collate = DataCollatorForLanguageModeling(pad_token_id=pad_token_id, padding_free=way.packed)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Inputs]:
        shares = [rows[process :: self._processes] for process in range(self._processes)]
        parts = [micro_batches([len(row["input_ids"]) for row in share], self.way) for share in shares]
        mine = shares[self._process]
        found = [self.micro_batch([mine[place] for place in part]) for part in parts[self._process]]
        # The processes wait for each other in every micro-batch, so each has as many.
        return found + [self._idle() for _ in range(max(map(len, parts)) - len(found))]

    def micro_batch(self, rows: Sequence[dict[str, Any]]) -> Inputs:
        """These rows as one micro-batch."""
        # torch makes a tensor of an array at once, and of a list number by number: nine tenths of the time.
        arrays = [{name: np.asarray(row[name]) for name in ("input_ids", "labels")} for row in rows]
        found: Inputs = self._collate(arrays)
        return found

    def _idle(self) -> Idle:
        return Idle(self.micro_batch([{"input_ids": [0, 0], "labels": [-100, -100]}]))


def split(inputs: Inputs) -> tuple[Inputs, Inputs] | None:
    """The rows of a micro-batch as two smaller ones, each padded to its own longest row; None for a single row."""
    rows = row_count(inputs)
    if rows == 1:
        return None
    half = (rows + 1) // 2
    return _some(inputs, 0, half), _some(inputs, half, rows)


def for_model(inputs: Inputs, *, masked: bool) -> Inputs:
    """The arguments of the model's forward pass for a micro-batch, with its padding mask only where it is `masked`.

    See `finetune.model.causality.needs_mask`.
    """
    return inputs if masked else {name: value for name, value in inputs.items() if name != "attention_mask"}


def row_count(inputs: Inputs) -> int:
    """How many rows a micro-batch holds, packed ones too."""
    return len(inputs["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in inputs else len(inputs["input_ids"])


def first_row(inputs: Inputs) -> list[int]:
    """The tokens of the first row of a micro-batch, without padding."""
    found: list[int] = _some(inputs, 0, 1)["input_ids"][0].tolist()
    return found


def _some(inputs: Inputs, first: int, end: int) -> Inputs:
    return (_packed_rows if "cu_seq_lens_q" in inputs else _rows)(inputs, first, end)


def _rows(inputs: Inputs, first: int, end: int) -> Inputs:
    tokens = int(inputs["attention_mask"][first:end].sum(dim=1).max())
    return {name: tensor[first:end, :tokens] for name, tensor in inputs.items()}


def _packed_rows(inputs: Inputs, first: int, end: int) -> Inputs:
    starts = inputs["cu_seq_lens_q"][first : end + 1]
    tokens = slice(int(starts[0]), int(starts[-1]))
    starts = starts - starts[0]
    longest = int(starts.diff().max())
    by_token = {name: inputs[name][:, tokens] for name in ("input_ids", "labels", "position_ids")}
    return {
        **by_token,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": inputs["seq_idx"][:, tokens] - first,
    }
