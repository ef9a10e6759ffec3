"""From the data section to two data sets of token ids and labels, with a count of what was left out and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.config import DataSection, named
from finetune.config.fields import unknown
from finetune.data import chat, formats, lengths, sources
from finetune.data.chat import Encoded
from finetune.data.counts import DUPLICATE, EMPTY, TOO_LONG, UNTRAINED, Affected, Counts
from finetune.data.formats import RowError
from finetune.data.problems import Problems
from finetune.data.sources import Row
from finetune.errors import ConfigError, DataError


@dataclass(frozen=True)
class Prepared:
    """Tokenized splits and counts.

    A split is a `datasets.Dataset` of input_ids, labels, length, number of trained tokens, place and source.
    """

    train: Any
    eval: Any | None
    train_counts: Counts
    eval_counts: Counts | None

    def affected(self) -> Iterator[dict[str, Any]]:
        """The rows of both splits that were left out or changed, as lines of data.jsonl."""
        for split, found in (("train", self.train_counts), ("eval", self.eval_counts)):
            for row in found.affected if found else ():
                yield row.as_dict(split)


def prepare(section: DataSection, tokenizer: Any) -> Prepared:
    """Read, format, tokenize and mask both splits.

    Raises DataError for the rows that cannot be read (file:line and field, up to 20), or when nothing is left to train;
    ConfigError where `data.columns` names a field that no format has.
    """
    _check_columns(section)
    problems = Problems()
    train_rows, eval_rows = _splits(section, problems)
    train, train_counts = _tokenize(train_rows, section, tokenizer, problems)
    if not train_counts.rows:
        where = f"`data.train` ({named(section.train)})"
        raise DataError(
            f"{where} leaves nothing to train: {train_counts.dropped} rows dropped "
            f"({', '.join(f'{rows} {why}' for why, rows in train_counts.dropped_why.items())}), with `data.max_length` "
            f"{section.max_length}, `data.too_long` {section.too_long} and `data.loss_on` {section.loss_on}"
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
        example = _read(row, section.format, section)
        found.append(_encode(row, example, section, tokenizer).input_ids[:tokens])
        if len(found) == rows:
            break
    return found


def held_out_rows(section: DataSection) -> Iterator[Row]:
    """The held-out rows as they stand in the source; the training rows where nothing is held out."""
    train_rows, eval_rows = _splits(section, Problems())
    yield from train_rows if eval_rows is None else eval_rows


def questions(section: DataSection, count: int) -> list[tuple[list[formats.Message], str]]:
    """The first held-out conversations as (messages before the last answer, that answer); none with tools."""
    found: list[tuple[list[formats.Message], str]] = []
    for row in held_out_rows(section):
        example = _read(row, section.format, section)
        if not isinstance(example, formats.Chat) or example.tools:
            continue
        *asked, answer = example.messages
        if asked and answer["role"] == "assistant" and answer["content"].strip():
            found.append((asked, answer["content"]))
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

    found = Counts()
    columns: dict[str, list[Any]] = {
        name: [] for name in ("input_ids", "labels", "length", "trained", "place", "source")
    }
    forms: dict[str, str] = {}
    seen: dict[int, str] = {}
    for row in rows:
        if row.source not in forms:
            forms[row.source] = _detect(row, section) if section.format == "auto" else section.format
        try:
            kept = _kept(row, forms[row.source], section, tokenizer, seen, found.affected)
        except DataError as error:
            problems.add(error)
            continue
        for encoded in kept:
            found.rows += 1
            found.tokens += len(encoded.input_ids)
            found.trained_tokens += encoded.trained
            found.longest = max(found.longest, len(encoded.input_ids))
            columns["input_ids"].append(np.array(encoded.input_ids, dtype=np.int32))
            columns["labels"].append(np.array(encoded.labels, dtype=np.int32))
            columns["length"].append(len(encoded.input_ids))
            columns["trained"].append(encoded.trained)
            columns["place"].append(row.place)
            columns["source"].append(row.source)
    return datasets.Dataset.from_dict(columns), found


def _kept(
    row: Row, form: str, section: DataSection, tokenizer: Any, seen: dict[int, str], affected: list[Affected]
) -> list[Encoded]:
    """What a row of the source is trained as: one row, pieces of it, or none. What is done to it goes to `affected`.

    `seen` is where each content was first found, by its hash.
    """
    example = _read(row, form, section)
    if chat.is_empty(example, section.loss_on):
        affected.append(Affected(row.place, "dropped", EMPTY))
        return []
    encoded = _encode(row, example, section, tokenizer)
    length = len(encoded.input_ids)
    if not encoded.trained:
        affected.append(Affected(row.place, "dropped", UNTRAINED, length))
        return []
    # A source may be read more than once on purpose; a duplicate stands at another place.
    if seen.setdefault(hash((tuple(encoded.input_ids), tuple(encoded.labels))), row.place) != row.place:
        what = "dropped" if section.duplicates == "drop" else "kept"
        affected.append(Affected(row.place, what, DUPLICATE, length))
        if what == "dropped":
            return []
    if length <= section.max_length:
        return [encoded]
    try:
        what, pieces = lengths.TOO_LONG[section.too_long].apply(encoded, section.max_length)
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None
    trained = [piece for piece in pieces if piece.trained]
    affected.append(Affected(row.place, what if trained else "dropped", TOO_LONG, length))
    return trained


def _check_columns(section: DataSection) -> None:
    known = formats.known_fields(section.format)
    for name in section.columns:
        if name not in known:
            raise ConfigError(
                f"`data.columns`: the format `{section.format}` has no such field: {unknown(name, known)}"
            )


def _detect(row: Row, section: DataSection) -> str:
    try:
        return formats.detect(formats.mapped(row.fields, section.columns))
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None


def _read(row: Row, form: str, section: DataSection) -> formats.Example:
    try:
        return formats.FORMATS[form].read(formats.mapped(row.fields, section.columns))
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None


def _encode(row: Row, example: formats.Example, section: DataSection, tokenizer: Any) -> Encoded:
    try:
        return chat.encode(example, tokenizer, section.loss_on)
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None
