"""From the data section to two data sets of token ids and labels, with a count of what was left out and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from finetune.config import DataSection, named
from finetune.data import chat, formats, sources
from finetune.data.formats import RowError
from finetune.data.problems import Problems
from finetune.data.sources import Row
from finetune.errors import DataError


@dataclass
class Counts:
    """What became of the rows of one split."""

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    truncated: int = 0
    dropped: int = 0
    dropped_places: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """Tokenized splits and counts.

    A split is a `datasets.Dataset` of input_ids, labels, length, number of trained tokens, place and source.
    """

    train: Any
    eval: Any | None
    train_counts: Counts
    eval_counts: Counts | None


def prepare(section: DataSection, tokenizer: Any) -> Prepared:
    """Read, format, tokenize and mask both splits.

    Raises DataError for the rows that cannot be read (file:line and field, up to 20), or when nothing is left to train.
    """
    problems = Problems()
    train_rows, eval_rows = _splits(section, problems)
    train, train_counts = _tokenize(train_rows, section, tokenizer, problems)
    if not train_counts.rows:
        where = f"`data.train` ({named(section.train)})"
        raise DataError(
            f"{where} leaves nothing to train: {train_counts.dropped} rows dropped because no trained token was left "
            f"within `data.max_length` {section.max_length}"
            if train_counts.dropped
            else f"{where} has no rows"
        )
    if eval_rows is None:
        return Prepared(train, None, train_counts, None)
    held_out, eval_counts = prepare_held_out(section, tokenizer)
    return Prepared(train, held_out, train_counts, eval_counts)


def prepare_held_out(section: DataSection, tokenizer: Any) -> tuple[Any, Counts]:
    """The held-out split alone. Raises DataError when there is none, or no row of it is left."""
    problems = Problems()
    _, eval_rows = _splits(section, problems)
    if eval_rows is None:
        raise DataError("`data.eval: none` keeps nothing back, so there are no held-out rows")
    held_out, counts = _tokenize(eval_rows, section, tokenizer, problems)
    if not counts.rows:
        raise DataError(
            f"no held-out row is left (`data.eval: {named(section.eval)}`, share {section.eval_share}, "
            f"{counts.dropped} dropped); set `data.eval` to a file, a larger `data.eval_share`, or `data.eval: none`"
        )
    return held_out, counts


def held_out_ids(section: DataSection, tokenizer: Any, rows: int, tokens: int) -> list[list[int]]:
    """Token ids of the first held-out rows (training rows, where none are held out), cut to `tokens`."""
    found = []
    for row in held_out_rows(section):
        found.append(_encode(row, section.format, section, tokenizer).input_ids[:tokens])
        if len(found) == rows:
            break
    return found


def held_out_rows(section: DataSection) -> Iterator[Row]:
    """The held-out rows as they stand in the source; the training rows where nothing is held out."""
    train_rows, eval_rows = _splits(section, Problems())
    yield from train_rows if eval_rows is None else eval_rows


def questions(section: DataSection, count: int) -> list[tuple[list[formats.Message], str]]:
    """The first held-out conversations as (messages before the last answer, that answer)."""
    found: list[tuple[list[formats.Message], str]] = []
    for row in held_out_rows(section):
        example = _read(row, section.format)
        if isinstance(example, formats.Chat) and example.messages[-1]["role"] == "assistant" and example.messages[:-1]:
            found.append((example.messages[:-1], example.messages[-1]["content"]))
        if len(found) >= count:
            break
    return found


def _splits(section: DataSection, problems: Problems) -> tuple[Iterable[Row], Iterable[Row] | None]:
    """Training and held-out rows; what is wrong with either is added to `problems` and raised after the last row."""
    train = sources.rows(section.train, "train", problems)
    if section.eval == "none":
        return train, None
    if section.eval != "auto":
        sources.refuse_shared(section.train, section.eval)
        return train, sources.rows(section.eval, "eval", problems)
    if sources.has_held_out_split(section.train):
        return train, sources.rows(section.train, "eval", problems)

    def held_out(row: Row) -> bool:
        return row.share() < section.eval_share

    return (
        (row for row in train if not held_out(row)),
        (row for row in sources.rows(section.train, "train", problems) if held_out(row)),
    )


def _tokenize(rows: Iterable[Row], section: DataSection, tokenizer: Any, problems: Problems) -> tuple[Any, Counts]:
    import datasets

    counts = Counts()
    columns: dict[str, list[Any]] = {
        name: [] for name in ("input_ids", "labels", "length", "trained", "place", "source")
    }
    forms: dict[str, str] = {}
    for row in rows:
        if row.source not in forms:
            forms[row.source] = _detect(row) if section.format == "auto" else section.format
        try:
            encoded = _encode(row, forms[row.source], section, tokenizer)
        except DataError as error:
            problems.add(error)
            continue
        if len(encoded.input_ids) > section.max_length:
            encoded = encoded.cut(section.max_length)
            counts.truncated += 1
        if not encoded.trained:
            counts.dropped += 1
            counts.dropped_places.append(row.place)
            continue
        counts.rows += 1
        counts.tokens += len(encoded.input_ids)
        counts.trained_tokens += encoded.trained
        counts.longest = max(counts.longest, len(encoded.input_ids))
        columns["input_ids"].append(np.array(encoded.input_ids, dtype=np.int32))
        columns["labels"].append(np.array(encoded.labels, dtype=np.int32))
        columns["length"].append(len(encoded.input_ids))
        columns["trained"].append(encoded.trained)
        columns["place"].append(row.place)
        columns["source"].append(row.source)
    return datasets.Dataset.from_dict(columns), counts


def _detect(row: Row) -> str:
    try:
        return formats.detect(row.fields)
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None


def _read(row: Row, form: str) -> formats.Example:
    try:
        return formats.FORMATS[form].read(row.fields)
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None


def _encode(row: Row, form: str, section: DataSection, tokenizer: Any) -> chat.Encoded:
    example = _read(row, form)
    try:
        return chat.encode(example, tokenizer, section.loss_on)
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None
