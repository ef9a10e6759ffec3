"""Rows with a teacher's likeliest tokens at each token, and their log-probabilities, to learn its distribution from.

input_ids, labels, teacher_ids, teacher_logprobs     lists of the same length; of each token a list of k
input_ids, labels, prompt_logprobs                   as vLLM returns them: of each token {id: {"logprob": ...}}

An entry belongs to the token at its own position, given the tokens before it, as a label does. That of a token which is
not trained may be empty or null, as vLLM's first one is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from finetune.config.field_types import shortened
from finetune.data import fields as row
from finetune.data.encoded import IGNORE, Teacher
from finetune.data.examples import Content, RowError, Tokens
from finetune.data.fields import Fields

OPTIONAL = ("labels", "attention_mask", "teacher_ids", "teacher_logprobs", "prompt_logprobs")

# Rounding of a teacher in 16 bit; more is no distribution.
_MOST_TOGETHER = 1.02

_LARGEST_ID = 2**31 - 1
_ID = re.compile(r"\d{1,10}")

# Entries of a row, which take 8 bytes each; more is not a row that could be trained.
_MOST_ENTRIES = 2**28

TokenLogProbs = dict[int, float]
"""The log-probabilities of a teacher's likeliest tokens at one position, by id."""


def read(fields: Fields, tokens: Tokens, start: int) -> Tokens:
    """`tokens`, the row's from `start` on, with the teacher's log-probabilities of each. Raises RowError."""
    count = len(row.integers(fields, "input_ids"))
    entries = []
    if fields.get("prompt_logprobs") is not None:  # as vLLM returns them
        for at, entry in enumerate(_list(fields, "prompt_logprobs", count)):
            pairs = dict(entry or {}).items() if isinstance(entry or {}, Mapping) else None
            if pairs is None or not all(isinstance(each, Mapping) and "logprob" in each for _, each in pairs):
                raise RowError(f"`prompt_logprobs[{at}]` must be an object of token ids, each with its `logprob`")
            numbers = [(int(token) if _ID.fullmatch(str(token)) else token, each["logprob"]) for token, each in pairs]
            entries.append(_checked(numbers, f"[{at}]"))
    else:
        ids, log_probs = (_list(fields, name, count) for name in ("teacher_ids", "teacher_logprobs"))
        for at, (own, values) in enumerate(zip(ids, log_probs, strict=True)):
            own, values = own or [], values or []
            if not isinstance(own, list) or not isinstance(values, list) or len(own) != len(values):
                raise RowError(f"`teacher_ids[{at}]` and `teacher_logprobs[{at}]` must be lists of the same length")
            entries.append(_checked(list(zip(own, values, strict=True)), f"[{at}]"))
    entries = entries[start : start + len(tokens.input_ids)]
    labels = tokens.input_ids if tokens.labels is None else tokens.labels
    for at, (entry, label) in enumerate(zip(entries, labels, strict=True)):
        if at and label != IGNORE and not entry:
            raise RowError(f"token {start + at} is trained and has no log-probabilities of a teacher")
    return replace(tokens, likely=entries)


def _list(fields: Fields, name: str, count: int) -> list[Any]:
    values = row.listed(fields.get(name), name)
    if not isinstance(values, list):
        raise RowError(
            f"`{name}` is missing: the teacher's likeliest tokens at each token, and beside `teacher_ids` their "
            "log-probabilities, `teacher_logprobs`"
            if values is None
            else f"`{name}` must be a list, not {row.kind_of(values)}"
        )
    if len(values) != count:
        raise RowError(f"`{name}` has {len(values)} entries and `input_ids` has {count}: one belongs to each token")
    return values


def _checked(pairs: list[tuple[Any, Any]], where: str) -> TokenLogProbs:
    """Ids with their log-probabilities. Raises RowError unless they are a distribution over distinct tokens."""
    entry: TokenLogProbs = {}
    for token, log_prob in pairs:
        if type(token) is not int or not 0 <= token <= _LARGEST_ID:
            raise RowError(f"{where}: a teacher's token must be an id, not {shortened(repr(token))}")
        if type(log_prob) not in (int, float) or not -row.LARGEST <= log_prob <= 0:
            written = shortened(repr(log_prob))
            raise RowError(
                f"{where}: the log-probability of token {token} must be a number up to 0, not {written}; leave out a "
                "token of probability 0"
            )
        if token in entry:
            raise RowError(f"{where}: token {token} is there twice")
        entry[token] = float(log_prob)
    if (together := sum(map(math.exp, entry.values()))) > _MOST_TOGETHER:
        raise RowError(f"{where}: the teacher's probabilities add up to {together:.3g}; give logarithms to base e")
    return entry


def kept(content: Content, most: int) -> Content:
    """`content` with `most` tokens of a teacher at each token, the likeliest, if it has any. Raises RowError."""
    if not isinstance(content, Tokens) or content.likely is None:
        return content
    import numpy as np

    shape = len(content.likely), most
    if math.prod(shape) > _MOST_ENTRIES:
        raise RowError(f"{shape[0]:,} tokens with {most} of a teacher each are too many; split or remove the row")
    ids, log_probs = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
    for at, entry in enumerate(content.likely):
        likeliest = sorted(entry.items(), key=lambda pair: -pair[1])[:most]
        ids[at, : len(likeliest)] = [token for token, _ in likeliest]
        log_probs[at, : len(likeliest)] = [log_prob for _, log_prob in likeliest]
    return replace(content, teacher=Teacher(ids, log_probs))
