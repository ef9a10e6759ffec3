"""Collates the rows of an optimizer step into micro-batches, each padded to its longest row, or packed.

Packed segments of a row, such as both answers to a prompt, have the tokens that they share computed once
(`attention.packing`). Padded ones each have their own copy.

Each rank takes its share of the rows; together they take the same rows as a single process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from finetune.config import Config, KernelsSection, TrainingSection
from finetune.data.batching import MicroBatching, micro_batches
from finetune.data.encoded import IGNORE, MEDIA, MISMATCHED, ONE_SEQUENCE, TEACHER, lengths_of
from finetune.data.media import TEXT_ALONE, Media, joined
from finetune.model.attention import packing
from finetune.objectives import MODEL_INPUTS, layout_of

Inputs = dict[str, Any]
"""A micro-batch: `input_ids`, `labels` and `attention_mask` (sequences, tokens). If packed, `input_ids`, `labels` and
`position_ids` (1, tokens), and `cu_seq_lens_q` (sequences + 1): the start of each and the end of the last one; where
sequences share tokens, also `key_parts`.

A row is one sequence, unless the layout of the rows names segments: then each segment is one, those of a row one after
the other, and `row` (sequences,) is the row of each. Each value of the rows is (rows,), float32; those of a teacher are
(sequences, tokens, k), or packed (1, tokens, k). `mismatched` is the micro-batch of the segments that go through the
model apart, if rows have such. `images` are, if any row shows some, the model's arguments for those of each row."""


def micro_batching(config: Config, architecture: Any = None) -> MicroBatching:
    """The division of a job's steps into micro-batches of rows with its objective's layout.

    Their segments share tokens if the `architecture` is known and allows it.
    """
    layout = layout_of(config)
    shares = (
        config.data.packing
        and layout.together > 1
        and architecture is not None
        and cannot_share(config.training, config.kernels, config.model.attention, architecture) is None
    )
    return MicroBatching.of(config.training, config.data, layout, shares=shares)


def cannot_share(training: TrainingSection, kernels: KernelsSection, attention: str, architecture: Any) -> str | None:
    """Why packed segments of a row cannot share tokens in a job, in one clause; None if they can."""
    if training.neftune_noise_alpha:
        return "each sequence has noise of its own"
    if kernels.compile == "layers":
        return "layers would be compiled anew for each micro-batch"
    return packing.cannot_share(attention, architecture)


_Sequence = tuple[np.ndarray, np.ndarray]
"""Token ids and labels of a sequence, (tokens,) each."""


class Idle(Inputs):
    """A micro-batch without trained tokens, for a rank that has fewer micro-batches in a step than others."""


class StepCollator:
    """Collates this rank's share of rows (`encoded.columns`) into a list of micro-batches.

    Each `context` ranks in a row are one of the `rank_groups` and split its rows' tokens: micro-batches then have
    `position_ids`, and as many tokens as can be divided among them. `media` makes the model's arguments of what rows
    show.
    """

    def __init__(
        self, way: MicroBatching, pad_token_id: int, rank: int = 0, world_size: int = 1, context: int = 1,
        media: Media = TEXT_ALONE,
    ) -> None:  # fmt: skip
        self.way, self.media = way, media
        self._group, self.rank_groups = rank // context, world_size // context
        self._pad_token_id, self._context = pad_token_id, context

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Inputs]:
        groups = [rows[group :: self.rank_groups] for group in range(self.rank_groups)]
        way = self.way
        parts = [
            micro_batches([way.length(lengths_of(row), way.shared(row)) for row in group], way, self.media.areas(group))
            for group in groups
        ]
        mine = groups[self._group]
        own = [self.micro_batch([mine[row] for row in part]) for part in parts[self._group]]
        # Ranks synchronise in every micro-batch, so all need the same number.
        return own + [self.idle() for _ in range(max(map(len, parts)) - len(own))]

    def micro_batch(self, rows: Sequence[dict[str, Any]]) -> Inputs:
        """Collate these rows into one micro-batch."""
        layout = self.way.layout
        sequences: list[_Sequence] = []
        measured: list[_Sequence] = []
        shared: list[int] = []
        for row in rows:
            ends = np.cumsum(lengths_of(row))[:-1]
            # torch converts an array at once, but a list number by number, which took 90% of the time.
            ids, labels = (np.split(np.asarray(row[name]), ends) for name in ("input_ids", "labels"))
            before = [0, *[self.way.shared(row)] * len(ends)]
            own = [
                (segment[first:], wanted[first:]) for segment, wanted, first in zip(ids, labels, before, strict=True)
            ]
            sequences += own[: layout.together]
            measured += own[layout.together :]
            shared += before[: layout.together]
        inputs = self._joined(sequences, shared)
        if measured:
            inputs[MISMATCHED] = self._joined(measured, [0] * len(measured))
        if layout != ONE_SEQUENCE:
            inputs["row"] = torch.arange(len(rows)).repeat_interleave(layout.together)
        for name in (*layout.values, *(one for one in layout.optional if one in rows[0])):
            inputs[name] = torch.tensor([row[name] for row in rows], dtype=torch.float32)
        for name, none in zip(TEACHER, (0, -math.inf), strict=True) if layout.teacher else ():
            parts = [np.asarray(row[name]).reshape(-1, layout.teacher) for row in rows]
            inputs[name] = _padded(parts, inputs["input_ids"].shape, none)
        return inputs | self.media.inputs(rows, inputs["input_ids"])

    def _joined(self, sequences: Sequence[_Sequence], shared: Sequence[int]) -> Inputs:
        """The sequences padded to the longest, or packed; packed ones see `shared` tokens before their own."""
        lengths = [len(ids) for ids, _ in sequences]
        if not self.way.packed:
            tokens = math.ceil(max(lengths) / self._context) * self._context
            inside = np.arange(tokens) < np.array(lengths)[:, None]
            ids = np.full(inside.shape, self._pad_token_id, np.int64)
            labels = np.full(inside.shape, IGNORE, np.int64)
            ids[inside], labels[inside] = (np.concatenate(each) for each in zip(*sequences, strict=True))
            inputs = {"input_ids": _tensor(ids), "labels": _tensor(labels)}
            if self._context > 1:  # each slice needs its positions
                inputs["position_ids"] = _tensor(np.where(inside, np.arange(tokens), 0))
            return {**inputs, "attention_mask": _tensor(inside.astype(np.int64))}
        padding = -sum(lengths) % self._context  # each token of it a sequence of its own
        lengths, shared = [*lengths, *[1] * padding], [*shared, *[0] * padding]
        ids, labels = (np.concatenate(each) for each in zip(*sequences, strict=True))
        ids = np.concatenate([ids, np.full(padding, self._pad_token_id)])
        labels = np.concatenate([labels, np.full(padding, IGNORE)])
        places = packing.places(lengths, shared)  # by which attention keeps sequences apart
        if not self.way.layout.scored:
            labels[places["cu_seq_lens_q"][:-1].numpy()] = IGNORE  # see encoded.IGNORE
        return {"input_ids": _tensor(ids)[None], "labels": _tensor(labels)[None], **places}

    def idle(self) -> Idle:
        """A micro-batch of one row without trained tokens."""
        return Idle(self.micro_batch([self.row([2] * self.way.layout.together, label=IGNORE)]))

    def row(self, computed: Sequence[int], label: int = 0, shared: int = 0) -> dict[str, Any]:
        """A row of tokens 0 with this label; `computed` has the tokens to compute in each segment of a pass."""
        lengths = [computed[0], *(length + shared for length in computed[1:])]
        lengths *= self.way.layout.sequences // self.way.layout.together
        tokens = sum(lengths)
        row = {"input_ids": [0] * tokens, "labels": [label] * tokens, **dict.fromkeys(self.way.layout.values, 0.0)}
        row |= dict.fromkeys(TEACHER, [0] * (tokens * self.way.layout.teacher)) if self.way.layout.teacher else {}
        return {**row, "segments": lengths, "shared": shared} if self.way.layout.segments else row


def _tensor(values: np.ndarray) -> torch.Tensor:
    """A copy, since what NumPy allocates is not counted (runtime/live_tensors.py)."""
    return torch.tensor(values)


def _padded(parts: Sequence[np.ndarray], shape: Sequence[int], none: float) -> torch.Tensor:
    """Values (tokens, k) of each sequence as one tensor (*shape, k): padded, or one after the other in a single row."""
    kind = np.int32 if none == 0 else np.float32
    whole = np.full((*shape, parts[0].shape[1]), none, kind)
    if shape[0] < len(parts):
        parts = [np.concatenate(parts)]
    for own, part in zip(whole, parts, strict=True):
        own[: len(part)] = part
    return _tensor(whole)


def halved(inputs: Inputs) -> tuple[Inputs, Inputs] | None:
    """The halves of a micro-batch, each padded to its own longest row; None for a single row."""
    rows = row_count(inputs)
    if rows == 1:
        return None
    half = (rows + 1) // 2
    return _some(inputs, 0, half), _some(inputs, half, rows)


def apart(inputs: Inputs) -> Inputs:
    """The micro-batch of the segments that go through the model apart, with the values of their rows."""
    return {name: value for name, value in {**inputs, **inputs[MISMATCHED]}.items() if name != MISMATCHED}


def passes(inputs: Inputs) -> list[Inputs]:
    """The micro-batch of each pass that takes all segments of the rows through the model."""
    return [inputs, apart(inputs)] if MISMATCHED in inputs else [inputs]


def for_model(inputs: Inputs, *, masked: bool) -> Inputs:
    """The keyword arguments of the model's forward pass for a micro-batch, the padding mask included if `masked`."""
    left_out = (MISMATCHED, MEDIA) if masked else (MISMATCHED, MEDIA, "attention_mask")
    seen = joined(inputs[MEDIA]) if MEDIA in inputs else {}
    return {name: value for name, value in inputs.items() if name not in left_out} | seen


def row_count(inputs: Inputs) -> int:
    """Number of rows in a micro-batch, packed or not."""
    if "row" in inputs:
        return int(inputs["row"][-1]) + 1
    return len(inputs["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in inputs else len(inputs["input_ids"])


def tokens_a_row(inputs: Inputs) -> int:
    """Tokens of each sequence of a micro-batch, padding included; of all sequences where they are packed."""
    return int(inputs["input_ids"].shape[1])


def token_ids(inputs: Inputs) -> list[torch.Tensor]:
    """Token ids (tokens,) of each sequence of a micro-batch, shared ones included, without padding."""
    ids = inputs["input_ids"]
    if "cu_seq_lens_q" in inputs:
        whole = packing.whole(inputs.get("key_parts"), ids[0], 0)
        return list(whole.split(inputs["cu_seq_lens_k"].diff().tolist()))
    return [row[:length] for row, length in zip(ids, inputs["attention_mask"].sum(dim=1).tolist(), strict=True)]


def first_row(inputs: Inputs) -> list[list[int]]:
    """Token ids of each segment of the first row of a micro-batch, without padding."""
    sequences = int((inputs["row"] == 0).sum()) if "row" in inputs else 1
    own = token_ids(inputs)[:sequences]
    return [ids.tolist() for ids in (*own, *(token_ids(inputs[MISMATCHED])[:1] if MISMATCHED in inputs else []))]


def _some(inputs: Inputs, first: int, end: int) -> Inputs:
    """Rows `first` to `end` of a micro-batch, padded to the longest of them."""
    own = {name: value for name, value in inputs.items() if name in MODEL_INPUTS or name in TEACHER}
    if "row" not in inputs:
        return _sequences(own, first, end) | ({MEDIA: inputs[MEDIA][first:end]} if MEDIA in inputs else {})
    start, stop = torch.searchsorted(inputs["row"], torch.tensor([first, end])).tolist()
    left = {name: value for name, value in inputs.items() if name not in own and name != "row"}
    values = {
        name: _sequences(value, first, end) if name == MISMATCHED else value[first:end] for name, value in left.items()
    }
    return {**_sequences(own, start, stop), "row": inputs["row"][start:stop] - first, **values}


def _sequences(inputs: Inputs, first: int, end: int) -> Inputs:
    """Sequences `first` to `end` of a micro-batch, padded to the longest of them, or packed."""
    if "cu_seq_lens_q" not in inputs:
        longest = int(inputs["attention_mask"][first:end].sum(dim=1).max())
        return {name: tensor[first:end, :longest] for name, tensor in inputs.items()}
    starts = inputs["cu_seq_lens_q"][first : end + 1]
    tokens = slice(int(starts[0]), int(starts[-1]))
    lengths = starts.diff()
    shared = inputs["cu_seq_lens_k"][first : end + 1].diff() - lengths
    there = [name for name in TEACHER if name in inputs]
    by_token = {name: inputs[name][:, tokens] for name in ("input_ids", "labels", *there)}
    return {**by_token, **packing.places(lengths.tolist(), shared.tolist())}
