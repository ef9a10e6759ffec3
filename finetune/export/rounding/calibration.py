"""The training rows with which a model is rounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from finetune.config import DataSection
from finetune.data import prepare
from finetune.data.encoded import MEDIA
from finetune.data.media import TEXT_ALONE, Media
from finetune.data.rows import RowTable
from finetune.errors import DataError

TOKENS = 2**16
"""Tokens that are enough: of the built-in base, four times as many or as few kept the same share of the gain."""
_LONGEST = 2048


def rows(
    section: DataSection, tokenizer: Any, seed: int, note: Callable[[str], None], media: Media = TEXT_ALONE
) -> torch.Tensor:
    """Token ids (rows, tokens) of training rows drawn by `seed`, one after the other, without those that show images.

    Never of the evaluation set. Raises DataError if there is no such row.
    """
    if not prepare.is_here(section):
        note("the rows were given from Python and are not kept on disk: the model is rounded with the built-in ones")
        media, section = (
            TEXT_ALONE,
            DataSection(chat_template=section.chat_template, control_tokens=section.control_tokens),
        )
    return ids_of(prepare.prepare(section, tokenizer, media).train, section.max_length, seed)


def ids_of(table: RowTable, max_length: int, seed: int) -> torch.Tensor:
    """`rows` of the prepared training rows in `table`. Raises DataError."""
    ids: list[int] = []
    for number in random.Random(seed).sample(range(len(table)), len(table)):
        row = table[number]
        if not row.get(MEDIA):
            ids += row["input_ids"]
        if len(ids) >= TOKENS:
            break
    if not ids:
        raise DataError("no training row is of text alone, and a model is rounded with such rows")
    rows, tokens = shape(max_length, min(len(ids), TOKENS))
    return torch.tensor(ids[: rows * tokens]).view(rows, tokens)


def shape(max_length: int, tokens: int) -> torch.Size:
    """The shape (rows, tokens) in which up to `tokens` tokens are used: never as many rows as tokens, so that no
    tensor's dimension is taken for another.
    """
    length = min(max_length, _LONGEST, tokens)
    count = tokens // length
    return torch.Size((count - 1 if count == length > 1 else count, length))
