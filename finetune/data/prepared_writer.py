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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
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
from finetune.data.readers import NO_HEADER, has_header
from finetune.data.rows import mapped, writer
from finetune.data.sources import Row
from finetune.data.splits import Split
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


class _Read(NamedTuple):
    """A row with its content in a format, or the error in it; `before`: how many problems were found before it."""

    row: Row
    content: Content | DataError | Unusable
    form: str
    before: int


_Tokens = Encoded | DataError | Unusable
"""A row in tokens, or why it has none: an error in it, or the reason to drop it."""


@dataclass(frozen=True)
class Preparation:
    """How rows become tokens: the settings that determine the rows of the training and of the evaluation set.

    `_rows_to_train` takes batches of rows through four stages: `_read` makes their content, `_measured` the sizes of
    what they show, `_encoded` their tokens, and `_Selection.kept` drops, cuts or keeps them.
    """

    section: DataSection
    tokenizer: Any
    media: Media = TEXT_ALONE

    def prepared(self, split: Split, rows: Iterable[Row], problems: Problems) -> tuple[Any, Counts]:
        """The tokenized `rows` and their statistics, from the cache if possible. Raises as `prepare` does."""

        def fill(folder: Path) -> None:
            counts = Counts()
            with writer(folder / _ROWS, media=bool(self.media)) as write, problems:
                for kept in self._rows_to_train(rows, problems, counts):
                    write(kept)
                    problems.stop_at(len(problems.found))
            if ANSWER in counts.segments:
                os.replace(folder / _ROWS, folder / _ANSWERS)
                mismatched.add(folder / _ANSWERS, folder / _ROWS, counts, self.section.max_length, f"`data.{split}`")
                (folder / _ANSWERS).unlink()
            with cache.writing():
                (folder / _COUNTS).write_text(json.dumps(counts.stored()), encoding="utf-8")

        folder = cache.entry(lambda: self._key(split), fill)
        return mapped(folder / _ROWS), Counts.of_stored(json.loads((folder / _COUNTS).read_text(encoding="utf-8")))

    def _rows_to_train(
        self, rows: Iterable[Row], problems: Problems, counts: Counts
    ) -> Iterator[list[tuple[Row, Encoded]]]:  # fmt: skip
        """Yield the rows to train, a batch at a time, and count them; errors become `problems`, in the rows' order."""
        selection = _Selection(self.section, counts.affected)
        for batch in self._read(rows, problems, counts.traits.unused):
            known, kept = len(problems.found), []
            for read, tokens in self._encoded([*self._measured(batch)]):
                try:
                    own = selection.kept(read.row, tokens)
                except DataError as error:
                    # Reading ahead may already have added problems of later rows; insert this one before them.
                    problems.add(error, at=read.before + len(problems.found) - known)
                    continue
                if own and not isinstance(read.content, Exception):
                    counts.add(read.content, own)
                kept += [(read.row, each) for each in own]
            yield kept

    def trains(self, row: Row) -> bool:
        """Whether a token of this row would be trained, if it has no error, which `prepared` raises."""
        problems = Problems()
        try:
            return any([*self._rows_to_train([row], problems, Counts())]) or bool(problems.found)
        except DataError:
            return True

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

    def _read(self, rows: Iterable[Row], problems: Problems, unused: list[str]) -> Iterator[list[_Read]]:
        """Read rows, each in the format of its source; adds the names of fields that are ignored to `unused`.

        A batch has up to _BATCH_ROWS, or about _BATCH_SIZE characters of text, tokens and bytes of media.
        """
        section, columns = self.section, self.section.columns
        forms: dict[str, str] = {}  # by source: that of its first row
        batch: list[_Read] = []
        size = 0
        try:
            for row in rows:
                content: Content | DataError | Unusable
                ignored: list[str] = []
                try:
                    with located(row):
                        if row.source not in forms:
                            auto = section.format == "auto"
                            forms[row.source] = formats.detect(row.fields, columns) if auto else section.format
                        form = forms[row.source]
                        content, ignored = formats.read(row.fields, form, columns, section.separator)
                        if completed := formats.FORMATS[form].completed:
                            content = completed(content, section)
                except (DataError, Unusable) as error:
                    batch.append(_Read(row, error, "", len(problems.found)))
                else:
                    batch.append(_Read(row, content, form, len(problems.found)))
                    for example in parts(content):
                        if isinstance(example, Chat):
                            ignored += [f"messages.{field}" for field in chat.unused(example, self.tokenizer)]
                        if isinstance(example, Tokens):
                            size += len(example.input_ids)
                        else:
                            size += sum(map(len, control.texts(example)))
                            size += sum(len(one.data) for one in media_in(example))
                    if form == "pairs" and "margin" in ignored:
                        ignored[ignored.index("margin")] = f"margin ({formats.MARGINS})"
                    rejected = columns.get("rejected", "rejected")
                    if form == "preference" or rejected in ignored:
                        ignored = [name for name in ignored if name != rejected]
                        ignored.append(f"{rejected} ({formats.PREFERENCES})")
                    unused += [field for field in dict.fromkeys(ignored) if field not in unused]
                if len(batch) >= _BATCH_ROWS or size >= _BATCH_SIZE:
                    yield batch
                    batch, size = [], 0
        except DataError:  # ends reading, but the rows before it may have problems too
            yield batch
            raise
        yield batch

    def _measured(self, batch: list[_Read]) -> Iterator[_Read]:
        """Yield the rows to train that the rows of the source become, with the sizes of what they show."""

        def measured(read: _Read) -> _Read:
            if isinstance(read.content, Exception) or not any(map(media_in, parts(read.content))):
                return read
            try:
                with located(read.row):
                    return read._replace(content=self.media.measured(read.content, read.row.folder))
            except DataError as error:
                return read._replace(content=error)

        for read in self.media.each(measured, batch):
            if isinstance(read.content, Exception) or not (rows_of := formats.FORMATS[read.form].rows):
                yield read
                continue
            for name, content in rows_of(read.content).items():
                location = f"{read.row.location}, {name}" if name else read.row.location
                yield read._replace(row=read.row._replace(location=location), content=content)

    def _encoded(self, reads: list[_Read]) -> Iterator[tuple[_Read, _Tokens]]:
        """Yield each row with its tokens, or why it has none."""
        section, tokenizer = self.section, self.tokenizer
        policy = lengths.TOO_LONG[section.too_long]
        full = {
            number: read.content
            for number, read in enumerate(reads)
            if not isinstance(read.content, Exception) and not chat.is_empty(read.content, section.loss_on)
        }
        rows = chat.encode_all(list(full.values()), tokenizer, section.loss_on, section.control_tokens)
        encoded: dict[int, Encoded | RowError] = dict(zip(full, rows, strict=True))
        if policy.keeps_head:
            long = {
                number: row
                for number, row in encoded.items()
                if isinstance(row, Encoded) and len(row.segments) == 1 and row.lengths[0] > section.max_length
            }
            asked = [(parts(full[number])[0], row.segments[0]) for number, row in long.items()]
            heads = chat.heads(asked, tokenizer, section.control_tokens)
            for (number, row), head in zip(long.items(), heads, strict=True):
                encoded[number] = replace(row, segments=(replace(row.segments[0], head=head),))

        for number, read in enumerate(reads):
            found = encoded.get(number)
            if isinstance(read.content, Exception):
                yield read, read.content
            elif found is None:
                yield read, Unusable(EMPTY)
            elif isinstance(found, TooMuchText) and policy.blind:
                yield read, Unusable(TOO_LONG)
            else:
                try:
                    with located(read.row):
                        if isinstance(found, RowError):
                            raise found
                        self.media.check_tokens(found.input_ids, found.media)
                except DataError as error:
                    yield read, error
                else:
                    yield read, found


@dataclass
class _Selection:
    """Drops, cuts or keeps rows in tokens; adds those that it drops or changes to `affected`."""

    section: DataSection
    affected: list[Affected]
    layout: RowLayout | None = None  # that of the first row
    hashes: set[int] = field(default_factory=set)
    last: tuple[str, bool] = "", False  # where the last row came from, and whether it is a duplicate

    def kept(self, row: Row, tokens: _Tokens) -> list[Encoded]:
        """The rows to train for one row of the source: itself, pieces of it, or none.

        Raises DataError for a bad row.
        """
        section, dropped = self.section, ""
        if isinstance(tokens, DataError):
            raise tokens
        if isinstance(tokens, Unusable):
            self.affected.append(Affected(row.location, "dropped", str(tokens)))
            return []
        if tokens.layout != (self.layout or tokens.layout):
            raise DataError(f"{row.location}: {self.layout} and {tokens.layout} cannot be trained together")
        self.layout = tokens.layout
        length = sum(tokens.lengths)
        first, *others = tokens.segments
        if not all(segment.trained for segment in tokens.segments):
            dropped = UNTRAINED
        elif others and all((each.input_ids, each.labels) == (first.input_ids, first.labels) for each in others):
            dropped = EQUAL  # nothing can be learnt from comparing them
        else:
            remarks = [CONTROL_TOKENS] * tokens.escaped + [LOST_THOUGHTS] * tokens.lost_thoughts
            # A duplicate has the tokens and labels of an earlier row, by 64-bit hash; repetitions by weight do not
            # count.
            if row.location != self.last[0]:
                content = hash((
                    tuple(tokens.input_ids), tuple(tokens.labels), tokens.lengths, tuple(tokens.values.values()),
                    tuple(image.digest for image in tokens.media),
                ))  # fmt: skip
                self.last = row.location, content in self.hashes
                self.hashes.add(content)
            if self.last[1] and section.duplicates == "drop":
                dropped = DUPLICATE
            elif self.last[1]:
                remarks.append(DUPLICATE)
            self.affected += [Affected(row.location, "kept", why, length) for why in remarks]

        too_long = not dropped and max(tokens.lengths) > section.max_length
        if too_long and tokens.media and lengths.TOO_LONG[section.too_long].cuts:
            dropped = TOO_LONG  # no image may lose some of its tokens
        if dropped:
            self.affected.append(Affected(row.location, "dropped", dropped, length))
            return []
        if not too_long:
            return [tokens]
        with located(row):
            what, pieces = lengths.shortened(tokens, section.max_length, section.too_long)
        trained = [piece for piece in pieces if piece.trained]
        self.affected.append(Affected(row.location, what if trained else "dropped", TOO_LONG, length))
        return trained
