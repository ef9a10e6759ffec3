"""Prepares one split: rows are read, tokenized, counted and written to disk, or reused from the cache.

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
from dataclasses import asdict, dataclass, field, replace
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
    labelled,
    lengths,
    mismatched,
    sources,
    teachers,
    unpaired,
)
from finetune.data.columnar import Struct
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
    Completion,
    Content,
    Example,
    NoSuchField,
    RowError,
    Tokens,
    Unusable,
    kind,
    media_in,
    parts,
    system,
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
    """The settings that determine the rows of both splits."""

    section: DataSection
    tokenizer: Any
    media: Media = TEXT_ALONE

    def split(self, split: Split, rows: Iterable[Row], problems: Problems) -> tuple[Any, Counts]:
        """The tokenized `rows` and their statistics, from the cache if possible. Raises as `prepare` does."""

        def fill(folder: Path) -> None:
            counts = Counts()
            with writer(folder / _ROWS, media=bool(self.media)) as write:
                _SplitWriter(self.section, self.tokenizer, problems, counts, write, self.media).take(rows)
            if ANSWER in counts.segments:
                os.replace(folder / _ROWS, folder / _ANSWERS)
                mismatched.add(folder / _ANSWERS, folder / _ROWS, counts, self.section.max_length, f"`data.{split}`")
                (folder / _ANSWERS).unlink()
            with cache.writing():
                (folder / _COUNTS).write_text(json.dumps(asdict(counts)), encoding="utf-8")

        folder = cache.entry(lambda: self._key(split), fill)
        stored = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
        counts = Counts(**{**stored, "affected": [Affected(**row) for row in stored["affected"]]})
        return mapped(folder / _ROWS), counts

    def trains(self, row: Row) -> bool:
        """Whether a token of this row would be trained, if it has no error, which `split` raises."""
        counts = Counts()
        try:
            _SplitWriter(self.section, self.tokenizer, Problems(), counts, lambda kept: None, self.media).take([row])
        except DataError:
            return True
        return counts.rows > 0

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

    @property
    def size(self) -> int:
        """Characters of text, ids of tokens and bytes of images."""
        return 0 if isinstance(self.content, Exception) else sum(map(_size, parts(self.content)))


def _size(example: Example) -> int:
    if isinstance(example, Tokens):
        return len(example.input_ids)
    return sum(map(len, control.texts(example))) + sum(len(image.data) for image in media_in(example))


def _in_order_of_a_schema(example: Example) -> bool:
    """Whether a tool call has arguments from a struct, which does not keep the order in which they were written."""
    messages = example.messages if isinstance(example, Chat) else []
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
    return any(isinstance(arguments, Struct) and len(arguments) > 1 for arguments in calls)


def _answers_are_equal(row: Encoded) -> bool:
    """Whether a row has several segments that are all the same: nothing can be learnt from comparing them."""
    first, *others = row.segments
    return bool(others) and all((each.input_ids, each.labels) == (first.input_ids, first.labels) for each in others)


@dataclass
class _SplitWriter:
    section: DataSection
    tokenizer: Any
    problems: Problems
    counts: Counts
    write: Callable[[list[tuple[Row, Encoded]]], None]
    media: Media = TEXT_ALONE
    forms: dict[str, str] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    last: tuple[str, bool] = ("", False)
    layout: RowLayout | None = None

    def take(self, rows: Iterable[Row]) -> None:
        """Process all rows. Raises BadRows with all problems, in the order of the rows."""
        with self.problems:
            for batch in self._batches(rows):
                self.write(list(self._kept_of(batch)))
                self.problems.stop_at(len(self.problems.found))

    def _batches(self, rows: Iterable[Row]) -> Iterator[list[_Read]]:
        batch: list[_Read] = []
        size = 0
        try:
            for row in rows:
                batch.append(_Read(row, self._read(row), len(self.problems.found)))
                size += batch[-1].size
                if len(batch) >= _BATCH_ROWS or size >= _BATCH_SIZE:
                    yield batch
                    batch, size = [], 0
        except DataError:  # ends reading, but the rows before it may have problems too
            yield batch
            raise
        yield batch

    def _several(self, read: _Read) -> Iterator[_Read]:
        """Yield the rows to train that one row of the source becomes."""
        row = read.row
        if isinstance(read.content, Exception) or not formats.FORMATS[self.forms[row.source]].unpaired:
            yield read
            return
        for name, each in unpaired.rows_of(read.content).items():
            yield read._replace(row=row._replace(location=f"{row.location}, {name}") if name else row, content=each)

    def _measured(self, read: _Read) -> _Read:
        """The row with the sizes of its images, or the error in one of them."""
        if isinstance(read.content, Exception):
            return read
        try:
            with located(read.row):
                return read._replace(content=self.media.measured(read.content, read.row.folder))
        except DataError as error:
            return read._replace(content=error)

    def _read(self, row: Row) -> Content | DataError | Unusable:
        columns = self.section.columns
        try:
            with located(row):
                if row.source not in self.forms:
                    form = self.section.format
                    self.forms[row.source] = formats.detect(row.fields, columns) if form == "auto" else form
                content, unused = formats.read(row.fields, self.forms[row.source], columns, self.section.separator)
                content = labelled.numbered(content, self.section.labels)
                content = teachers.kept(content, self.section.teacher_tokens)
        except (DataError, Unusable) as error:
            return error
        for example in parts(content):
            if isinstance(example, Chat):
                unused += [f"messages.{name}" for name in chat.unused(example, self.tokenizer)]
        if self.forms[row.source] == "pairs" and "margin" in unused:
            unused[unused.index("margin")] = f"margin ({formats.MARGINS})"
        rejected = columns.get("rejected", "rejected")
        if self.forms[row.source] == "preference" or rejected in unused:
            unused = [*(name for name in unused if name != rejected), f"{rejected} ({formats.PREFERENCES})"]
        self.counts.unused += [name for name in dict.fromkeys(unused) if name not in self.counts.unused]
        return content

    def _kept_of(self, batch: list[_Read]) -> Iterator[tuple[Row, Encoded]]:
        loss_on, known = self.section.loss_on, len(self.problems.found)
        measured = self.media.each(self._measured, batch)
        batch = [each for read in measured for each in self._several(read)]
        full = {
            number: read.content
            for number, read in enumerate(batch)
            if not isinstance(read.content, Exception) and not chat.is_empty(read.content, loss_on)
        }
        rows = chat.encode_all(list(full.values()), self.tokenizer, loss_on, self.section.control_tokens)
        encoded = dict(zip(full, rows, strict=True))
        if lengths.TOO_LONG[self.section.too_long].keeps_head:
            encoded |= self._with_heads(full, encoded)
        for number, read in enumerate(batch):
            try:
                for kept in self._kept(read, encoded.get(number)):
                    content = full[number]
                    self.counts.add(kept, kind(content), system(content))
                    self.counts.schema_ordered += any(map(_in_order_of_a_schema, parts(content)))
                    self.counts.run_together += any(
                        isinstance(example, Completion) and example.runs_together for example in parts(content)
                    )
                    yield read.row, kept
            except DataError as error:
                # Reading ahead may already have added problems of later rows; insert this one before them.
                self.problems.add(error, at=read.problems + len(self.problems.found) - known)

    def _with_heads(
        self, full: dict[int, Content], encoded: dict[int, Encoded | RowError]
    ) -> dict[int, Encoded | RowError]:
        """The rows of one segment that are too long, with the length of its head set."""
        long = {
            number: row
            for number, row in encoded.items()
            if isinstance(row, Encoded) and len(row.segments) == 1 and row.lengths[0] > self.section.max_length
        }
        rows = [(parts(full[number])[0], row.segments[0]) for number, row in long.items()]
        heads = chat.heads(rows, self.tokenizer, self.section.control_tokens)
        return {
            number: replace(row, segments=(replace(row.segments[0], head=head),))
            for (number, row), head in zip(long.items(), heads, strict=True)
        }

    def _kept(self, read: _Read, encoded: Encoded | RowError | None) -> list[Encoded]:
        """The rows to train for one row of the source: itself, pieces of it, or none. Changes are counted."""
        location, section = read.row.location, self.section
        row = self._encoded(read, encoded)
        if isinstance(row, str):
            self.counts.affected.append(Affected(location, "dropped", row))
            return []
        if row.layout != (self.layout or row.layout):
            raise DataError(f"{location}: {self.layout} and {row.layout} cannot be trained together")
        self.layout = row.layout
        length = sum(row.lengths)
        for what, why in self._remarks(location, row):
            self.counts.affected.append(Affected(location, what, why, length))
            if what == "dropped":
                return []
        if max(row.lengths) <= section.max_length:
            return [row]
        if row.media and lengths.TOO_LONG[section.too_long].cuts:  # no image may lose some of its tokens
            self.counts.affected.append(Affected(location, "dropped", TOO_LONG, length))
            return []
        with located(read.row):
            what, pieces = lengths.shortened(row, section.max_length, section.too_long)
        trained = [piece for piece in pieces if piece.trained]
        self.counts.affected.append(Affected(location, what if trained else "dropped", TOO_LONG, length))
        return trained

    def _encoded(self, read: _Read, encoded: Encoded | RowError | None) -> Encoded | str:
        """The tokens of a row, or why it is dropped without any. Raises DataError for a bad row."""
        if isinstance(read.content, DataError):
            raise read.content
        if isinstance(read.content, Unusable):
            return str(read.content)
        if encoded is None:
            return EMPTY
        if isinstance(encoded, TooMuchText) and lengths.TOO_LONG[self.section.too_long].blind:
            return TOO_LONG
        if isinstance(encoded, RowError):
            raise DataError(f"{read.row.location}: {encoded}")
        with located(read.row):
            self.media.check_tokens(encoded.input_ids, encoded.media)
        return encoded

    def _remarks(self, location: str, row: Encoded) -> Iterator[tuple[str, str]]:
        """Yield ("kept" or "dropped", reason) for each remark on a row except its length; a drop is the last."""
        if not all(segment.trained for segment in row.segments):
            yield "dropped", UNTRAINED
        if _answers_are_equal(row):
            yield "dropped", EQUAL
        if row.escaped:
            yield "kept", CONTROL_TOKENS
        if row.lost_thoughts:
            yield "kept", LOST_THOUGHTS
        if self._again(location, row):
            yield "dropped" if self.section.duplicates == "drop" else "kept", DUPLICATE

    def _again(self, location: str, encoded: Encoded) -> bool:
        """Whether an earlier row has the same tokens and labels, by 64-bit hash; repetitions by weight do not count."""
        if location != self.last[0]:
            content = hash((
                tuple(encoded.input_ids), tuple(encoded.labels), encoded.lengths, tuple(encoded.values.values()),
                tuple(image.digest for image in encoded.media),
            ))  # fmt: skip
            self.last = location, content in self.seen
            self.seen.add(content)
        return self.last[1]
