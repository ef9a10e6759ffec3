"""Collates the rows of an optimizer step into micro-batches, each padded to its longest row, or packed.

Each rank takes its share of the rows; together they take the same rows as a single process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.config import Config
from finetune.data.batching import MicroBatching, micro_batches
from finetune.data.encoded import IGNORE, ONE_SEQUENCE, TEACHER, lengths_of
from finetune.objectives import MODEL_INPUTS, layout_of

Inputs = dict[str, Any]
"""A micro-batch: `input_ids`, `labels` and `attention_mask` (sequences, tokens). If packed, `input_ids`, `labels` and
`position_ids` (1, tokens), and `cu_seq_lens_q` (sequences + 1): the start of each and the end of the last one.

A row is one sequence, unless the layout of the rows names segments: then each segment is one, those of a row one after
the other, and `row` (sequences,) is the row of each. Each value of the rows is (rows,), float32. Those of a teacher are
(sequences, tokens, k), or packed (1, tokens, k)."""


def micro_batching(config: Config) -> MicroBatching:
    """How a job divides its steps into micro-batches, of rows of its objective's layout."""
    return MicroBatching.of(config.training, config.data, layout_of(config))


class Idle(Inputs):
    """A micro-batch without trained tokens, for a rank that has fewer micro-batches in a step than others."""


class MicroBatches:
    """Collates this rank's share of rows (`encoded.columns`) into a list of micro-batches.

    Each `context` ranks in a row have one share, whose rows they split: micro-batches then have `position_ids`, and as
    many tokens as can be divided among them.
    """

    def __init__(
        self, way: MicroBatching, pad_token_id: int, rank: int = 0, world_size: int = 1, context: int = 1
    ) -> None:
        self.way = way
        self._rank, self._world_size = rank // context, world_size // context
        split = context > 1  # each slice needs its positions
        self._collate = DataCollatorForLanguageModeling(
            pad_token_id=pad_token_id, padding_free=way.packed, return_position_ids=split,
            pad_to_multiple_of=context if split else None,
        )  # fmt: skip

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Inputs]:
        shares = [rows[rank :: self._world_size] for rank in range(self._world_size)]
        parts = [micro_batches([self.way.length(lengths_of(row)) for row in share], self.way) for share in shares]
        mine = shares[self._rank]
        own = [self.micro_batch([mine[row] for row in part]) for part in parts[self._rank]]
        # Ranks synchronise in every micro-batch, so all need the same number.
        return own + [self.idle() for _ in range(max(map(len, parts)) - len(own))]

    def micro_batch(self, rows: Sequence[dict[str, Any]]) -> Inputs:
        """Collate these rows into one micro-batch."""
        layout = self.way.layout
        arrays = []
        for row in rows:
            ends = np.cumsum(lengths_of(row))[:-1]
            # torch converts an array at once, but a list number by number, which took 90% of the time.
            ids, labels = (np.split(np.asarray(row[name]), ends) for name in ("input_ids", "labels"))
            arrays += [{"input_ids": own, "labels": wanted} for own, wanted in zip(ids, labels, strict=True)]
        inputs = self._collate(arrays)
        if layout != ONE_SEQUENCE:
            inputs["row"] = torch.arange(len(rows)).repeat_interleave(layout.sequences)
        for name in (*layout.values, *(one for one in layout.optional if one in rows[0])):
            inputs[name] = torch.tensor([row[name] for row in rows], dtype=torch.float32)
        for name, none in zip(TEACHER, (0, -math.inf), strict=True) if layout.teacher else ():
            parts = [np.asarray(row[name]).reshape(-1, layout.teacher) for row in rows]
            inputs[name] = _padded(parts, inputs["input_ids"].shape, none)
        return inputs

    def idle(self) -> Idle:
        """A micro-batch of one row without trained tokens."""
        return Idle(self.micro_batch([self.row([2] * self.way.layout.sequences, label=IGNORE)]))

    def row(self, lengths: Sequence[int], label: int = 0) -> dict[str, Any]:
        """A row with segments of these lengths, of the token 0, each with this label."""
        tokens = sum(lengths)
        row = {"input_ids": [0] * tokens, "labels": [label] * tokens, **dict.fromkeys(self.way.layout.values, 0.0)}
        row |= dict.fromkeys(TEACHER, [0] * (tokens * self.way.layout.teacher)) if self.way.layout.teacher else {}
        return {**row, "segments": list(lengths)} if self.way.layout.segments else row


def _padded(parts: Sequence[np.ndarray], shape: Sequence[int], none: float) -> torch.Tensor:
    """Values (tokens, k) of each sequence as one tensor (*shape, k): padded, or one after the other in a single row."""
    kind = np.int32 if none == 0 else np.float32
    whole = np.full((*shape, parts[0].shape[1]), none, kind)
    if shape[0] < len(parts):
        parts = [np.concatenate(parts)]
    for own, part in zip(whole, parts, strict=True):
        own[: len(part)] = part
    return torch.from_numpy(whole)


def split(inputs: Inputs) -> tuple[Inputs, Inputs] | None:
    """Split a micro-batch in two, each padded to its own longest row; None for a single row."""
    rows = row_count(inputs)
    if rows == 1:
        return None
    half = (rows + 1) // 2
    return _some(inputs, 0, half), _some(inputs, half, rows)


def for_model(inputs: Inputs, *, masked: bool) -> Inputs:
    """The keyword arguments of the model's forward pass for a micro-batch, the padding mask included if `masked`."""
    return inputs if masked else {name: value for name, value in inputs.items() if name != "attention_mask"}


def row_count(inputs: Inputs) -> int:
    """Number of rows in a micro-batch, packed or not."""
    if "row" in inputs:
        return int(inputs["row"][-1]) + 1
    return len(inputs["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in inputs else len(inputs["input_ids"])


def tokens_a_row(inputs: Inputs) -> int:
    """Tokens of each sequence of a micro-batch, padding included; of all sequences where they are packed."""
    return int(inputs["input_ids"].shape[1])


def token_ids(inputs: Inputs) -> list[torch.Tensor]:
    """Token ids (tokens,) of each sequence of a micro-batch, without padding."""
    ids = inputs["input_ids"]
    if "cu_seq_lens_q" in inputs:
        return list(ids[0].split(inputs["cu_seq_lens_q"].diff().tolist()))
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]


def first_row(inputs: Inputs) -> list[int]:
    """Token ids of the first row of a micro-batch, without padding; of all its segments one after the other."""
    sequences = int((inputs["row"] == 0).sum()) if "row" in inputs else 1
    return torch.cat(token_ids(inputs)[:sequences]).tolist()


def _some(inputs: Inputs, first: int, end: int) -> Inputs:
    own = {name: value for name, value in inputs.items() if name in MODEL_INPUTS or name in TEACHER}
    some = _packed_rows if "cu_seq_lens_q" in inputs else _rows
    if "row" not in inputs:
        return some(own, first, end)
    start, stop = torch.searchsorted(inputs["row"], torch.tensor([first, end])).tolist()
    values = {name: value[first:end] for name, value in inputs.items() if name not in own and name != "row"}
    return {**some(own, start, stop), "row": inputs["row"][start:stop] - first, **values}


def _rows(inputs: Inputs, first: int, end: int) -> Inputs:
    tokens = int(inputs["attention_mask"][first:end].sum(dim=1).max())
    return {name: tensor[first:end, :tokens] for name, tensor in inputs.items()}


def _packed_rows(inputs: Inputs, first: int, end: int) -> Inputs:
    starts = inputs["cu_seq_lens_q"][first : end + 1]
    tokens = slice(int(starts[0]), int(starts[-1]))
    starts = starts - starts[0]
    longest = int(starts.diff().max())
    there = [name for name in TEACHER if name in inputs]
    by_token = {name: inputs[name][:, tokens] for name in ("input_ids", "labels", "position_ids", *there)}
    return {
        **by_token,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": inputs["seq_idx"][:, tokens] - first,
    }
