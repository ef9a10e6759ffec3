"""Prepares the rows of a data set: they are read, tokenized, counted and written to disk, or reused from the cache.

Rows are processed a few hundred at a time and the result is memory-mapped, so data larger than memory is shuffled,
batched and resumed like any other. Only the hash of each row (to detect duplicates) and the list of dropped or changed
rows grow with the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config import DataSection
from finetune.config.field_types import GIVEN
from finetune.data import (
    cache,
    chat,
    control,
    fingerprint,
    formats,
    lengths,
    mismatched,
    sources,
)
from finetune.data.counts import (
    CONTROL_TOKENS,
    DUPLICATE,
    EMPTY,
    EQUAL,
    LOST_THOUGHTS,
    TOO_LONG,
    UNTRAINED,
    Affected,
    Counts,
)  # fmt: skip
from finetune.data.encoded import ANSWER, Encoded, RowLayout
from finetune.data.examples import (
    Chat,
    Content,
    NoSuchField,
    RowError,
    Tokens,
    Unusable,
    media_in,
    parts,
)
from finetune.data.media import TEXT_ALONE, Media
from finetune.data.problems import Problems
from finetune.data.python_docs import Split
from finetune.data.readers import NO_HEADER, has_header
from finetune.data.rows import mapped, writer
from finetune.data.sources import Row
from finetune.data.tokenizing import TooMuchText
from finetune.errors import DataError

# Increment with any change to the code that changes the prepared rows or the fields of their counts, to invalidate
# existing cache entries: versions of this package may share a cache, and an earlier one does not know new fields.
_VERSION = 12

_ROWS, _COUNTS = "rows.arrow", "counts.json"
_ANSWERS = "answers.arrow"  # the rows before mismatched answers are added

# Size of a batch to read, tokenize and write: enough to use all cores of the tokenizer, small enough for memory.
_BATCH_ROWS = 256
_BATCH_SIZE = 2**19


@contextlib.contextmanager
def located(row: Row) -> Iterator[None]:
    """Convert a RowError in the block into a DataError that names the row's location."""
    try:
        yield
    except RowError as error:
        header = f". {NO_HEADER}" if isinstance(error, NoSuchField) and has_header(row.location) else ""
        raise DataError(f"{row.location}: {error}{header}") from None


@dataclass
class Preparation:
    """How rows become tokens: the settings that determine the rows of the training and of the evaluation set.

    A row goes from its source through a reader, which makes its content, an encoder, which makes its tokens, and a
    selection, which drops, cuts or keeps it.
    """

    section: DataSection
    tokenizer: Any
    media: Media = TEXT_ALONE

    def prepared(self, split: Split, rows: Iterable[Row], problems: Problems) -> tuple[Any, Counts]:
        """The tokenized `rows` and their statistics, from the cache if possible. Raises as `prepare` does."""

        def fill(folder: Path) -> None:
            counts = Counts()
            with writer(folder / _ROWS, media=bool(self.media)) as write:
                self._write(rows, problems, counts, write)
            if ANSWER in counts.segments:
                os.replace(folder / _ROWS, folder / _ANSWERS)
                mismatched.add(folder / _ANSWERS, folder / _ROWS, counts, self.section.max_length, f"`data.{split}`")
                (folder / _ANSWERS).unlink()
            with cache.writing():
                (folder / _COUNTS).write_text(json.dumps(counts.stored()), encoding="utf-8")

        folder = cache.entry(lambda: self._key(split), fill)
        return mapped(folder / _ROWS), Counts.of_stored(json.loads((folder / _COUNTS).read_text(encoding="utf-8")))

    def trains(self, row: Row) -> bool:
        """Whether a token of this row would be trained, if it has no error, which `prepared` raises."""
        counts = Counts()
        try:
            self._write([row], Problems(), counts, lambda kept: None)
        except DataError:
            return True
        return counts.rows > 0

    def _write(
        self, rows: Iterable[Row], problems: Problems, counts: Counts,
        write: Callable[[list[tuple[Row, Encoded]]], None],
    ) -> None:  # fmt: skip
        """Take all rows through the stages, and count what is written.

        Raises BadRows with all problems, in the order of the rows.
        """
        reader = _Reader(self.section, self.tokenizer, counts.traits.unused)
        selection = _Selection(self.section, counts.affected)
        with problems:
            for batch in _batches(rows, reader, problems):
                known, kept = len(problems.found), []
                measured = self.media.each(self._measured, batch)
                batch = [row for read in measured for row in reader.rows_of(read)]
                for read, encoded in zip(batch, self._encoded(batch), strict=True):
                    try:
                        own = selection.kept(read, encoded)
                    except DataError as error:
                        # Reading ahead may already have added problems of later rows; insert this one before them.
                        problems.add(error, at=read.problems + len(problems.found) - known)
                        continue
                    if own and not isinstance(read.content, Exception):
                        counts.add(read.content, own)
                    kept += [(read.row, each) for each in own]
                write(kept)
                problems.stop_at(len(problems.found))

    def _measured(self, read: _Read) -> _Read:
        """The row with the sizes of what it shows, or the error in that."""
        if isinstance(read.content, Exception):
            return read
        try:
            with located(read.row):
                return read._replace(content=self.media.measured(read.content, read.row.folder))
        except DataError as error:
            return read._replace(content=error)

    def _encoded(self, batch: list[_Read]) -> list[_Tokens]:
        """The tokens of each row, or why it has none. A row with an error has that."""
        section, tokenizer = self.section, self.tokenizer
        full = {
            number: read.content
            for number, read in enumerate(batch)
            if not isinstance(read.content, Exception) and not chat.is_empty(read.content, section.loss_on)
        }
        rows = chat.encode_all(list(full.values()), tokenizer, section.loss_on, section.control_tokens)
        encoded: dict[int, Encoded | RowError] = dict(zip(full, rows, strict=True))
        if lengths.TOO_LONG[section.too_long].keeps_head:
            long = {
                number: row
                for number, row in encoded.items()
                if isinstance(row, Encoded) and len(row.segments) == 1 and row.lengths[0] > section.max_length
            }
            asked = [(parts(full[number])[0], row.segments[0]) for number, row in long.items()]
            heads = chat.heads(asked, tokenizer, section.control_tokens)
            for (number, row), head in zip(long.items(), heads, strict=True):
                encoded[number] = replace(row, segments=(replace(row.segments[0], head=head),))

        return [self._checked(read, encoded.get(number)) for number, read in enumerate(batch)]

    def _checked(self, read: _Read, row: Encoded | RowError | None) -> _Tokens:
        if isinstance(read.content, Exception):
            return read.content
        if row is None:
            return Unusable(EMPTY)
        if isinstance(row, TooMuchText) and lengths.TOO_LONG[self.section.too_long].blind:
            return Unusable(TOO_LONG)
        try:
            with located(read.row):
                if isinstance(row, RowError):
                    raise row
                if self.media:
                    self.media.check_tokens(row.input_ids, row.media)
        except DataError as error:
            return error
        return row

    def _key(self, split: Split) -> str | None:
        """A hash of everything that determines the split's rows; None if a source, a format or an image is of unknown
        content.
        """
        if self.section.format.startswith(GIVEN) or self.media:
            return None
        train, held_out = self.section.train, self.section.eval
        if held_out == "auto":  # whether there is a split for validation decides on the training rows too
            contents = [sources.contents(train, each) for each in ("train", "eval")]
        else:
            contents = [sources.contents(held_out if split == "eval" else train, split)]
        if None in contents:
            return None
        settings = self.section.model_dump(mode="json", exclude={"packing"})  # packing does not change rows
        libraries = [version(name) for name in ("transformers", "tokenizers", "jinja2")]
        parts = [_VERSION, split, contents, settings, self._spelling, libraries]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _spelling(self) -> list[Any]:
        known = [fingerprint.of(self.tokenizer), getattr(self.tokenizer, "split_special_tokens", False)]
        if self.tokenizer.is_fast:
            return known
        # The vocabulary of a tokenizer written in Python does not determine its behaviour.
        return [*known, type(self.tokenizer).__name__, json.dumps(self.tokenizer.init_kwargs, default=str)]


class _Read(NamedTuple):
    """A row with its content, or the error in it, and the number of problems found before it was read."""

    row: Row
    content: Content | DataError | Unusable
    problems: int


_Tokens = Encoded | DataError | Unusable
"""A row in tokens, or why it has none: an error in it, or the reason to drop it."""


class _Reader:
    """Reads the content of rows, each in the format of its source; adds names of ignored fields to `unused`."""

    def __init__(self, section: DataSection, tokenizer: Any, unused: list[str]) -> None:
        self._section = section
        self._tokenizer, self._unused = tokenizer, unused
        self._formats: dict[str, str] = {}  # by source: that of its first row

    def read(self, row: Row) -> Content | DataError | Unusable:
        """A row's content, or the error in it."""
        section, columns = self._section, self._section.columns
        try:
            with located(row):
                if row.source not in self._formats:
                    auto = section.format == "auto"
                    self._formats[row.source] = formats.detect(row.fields, columns) if auto else section.format
                name = self._formats[row.source]
                content, unused = formats.read(row.fields, name, columns, section.separator)
                content = formats.FORMATS[name].completed(content, section)
        except (DataError, Unusable) as error:
            return error
        for example in parts(content):
            if isinstance(example, Chat):
                unused += [f"messages.{field}" for field in chat.unused(example, self._tokenizer)]
        if name == "pairs" and "margin" in unused:
            unused[unused.index("margin")] = f"margin ({formats.MARGINS})"
        rejected = columns.get("rejected", "rejected")
        if name == "preference" or rejected in unused:
            unused = [*(field for field in unused if field != rejected), f"{rejected} ({formats.PREFERENCES})"]
        self._unused += [field for field in dict.fromkeys(unused) if field not in self._unused]
        return content

    def rows_of(self, read: _Read) -> Iterator[_Read]:
        """Yield the rows to train that one row of the source becomes."""
        if isinstance(read.content, Exception):
            yield read
            return
        row = read.row
        for name, each in formats.FORMATS[self._formats[row.source]].rows(read.content).items():
            yield read._replace(row=row._replace(location=f"{row.location}, {name}") if name else row, content=each)


def _batches(rows: Iterable[Row], reader: _Reader, problems: Problems) -> Iterator[list[_Read]]:
    """Read rows, at once up to _BATCH_ROWS, or about _BATCH_SIZE characters of text, tokens and bytes of media."""
    batch: list[_Read] = []
    size = 0
    try:
        for row in rows:
            content = reader.read(row)
            batch.append(_Read(row, content, len(problems.found)))
            for example in () if isinstance(content, Exception) else parts(content):
                if isinstance(example, Tokens):
                    size += len(example.input_ids)
                else:
                    size += sum(map(len, control.texts(example))) + sum(len(one.data) for one in media_in(example))
            if len(batch) >= _BATCH_ROWS or size >= _BATCH_SIZE:
                yield batch
                batch, size = [], 0
    except DataError:  # ends reading, but the rows before it may have problems too
        yield batch
        raise
    yield batch


class _Selection:
    """Drops, cuts or keeps rows in tokens; adds those that it drops or changes to `affected`."""

    def __init__(self, section: DataSection, affected: list[Affected]) -> None:
        self._section = section
        self._affected = affected
        self._layout: RowLayout | None = None  # that of the first row
        self._hashes: set[int] = set()
        self._last = "", False  # where the last row came from, and whether it is a duplicate

    def kept(self, read: _Read, row: _Tokens) -> list[Encoded]:
        """The rows to train for one row of the source: itself, pieces of it, or none.

        Raises DataError for a bad row.
        """
        location, section = read.row.location, self._section
        if isinstance(row, DataError):
            raise row
        if isinstance(row, Unusable):
            self._affected.append(Affected(location, "dropped", str(row)))
            return []
        if row.layout != (self._layout or row.layout):
            raise DataError(f"{location}: {self._layout} and {row.layout} cannot be trained together")
        self._layout = row.layout
        length = sum(row.lengths)
        for what, why in self._remarks(location, row):
            self._affected.append(Affected(location, what, why, length))
            if what == "dropped":
                return []

        if max(row.lengths) <= section.max_length:
            return [row]
        if row.media and lengths.TOO_LONG[section.too_long].cuts:  # no image may lose some of its tokens
            self._affected.append(Affected(location, "dropped", TOO_LONG, length))
            return []
        with located(read.row):
            what, pieces = lengths.shortened(row, section.max_length, section.too_long)
        trained = [piece for piece in pieces if piece.trained]
        self._affected.append(Affected(location, what if trained else "dropped", TOO_LONG, length))
        return trained

    def _remarks(self, location: str, row: Encoded) -> Iterator[tuple[str, str]]:
        """Yield ("kept" or "dropped", reason) for each remark on a row except its length; a drop is the last."""
        if not all(segment.trained for segment in row.segments):
            yield "dropped", UNTRAINED
        first, *others = row.segments
        if others and all((each.input_ids, each.labels) == (first.input_ids, first.labels) for each in others):
            yield "dropped", EQUAL  # nothing can be learnt from comparing them
        if row.escaped:
            yield "kept", CONTROL_TOKENS
        if row.lost_thoughts:
            yield "kept", LOST_THOUGHTS
        # A duplicate has the tokens and labels of an earlier row, by 64-bit hash; repetitions by weight do not count.
        if location != self._last[0]:
            content = hash((
                tuple(row.input_ids), tuple(row.labels), row.lengths, tuple(row.values.values()),
                tuple(image.digest for image in row.media),
            ))  # fmt: skip
            self._last = location, content in self._hashes
            self._hashes.add(content)
        if self._last[1]:
            yield "dropped" if self._section.duplicates == "drop" else "kept", DUPLICATE
