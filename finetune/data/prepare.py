"""From the data section to two data sets of token ids and labels, with a count of what was left out and why.

Rows are read, tokenized and written to disk some hundreds at a time, and what is trained on is mapped into memory. So
data that does not fit in memory is shuffled, batched and resumed as any other; there is no second kind of data set for
it. What grows in memory with the rows is a hash of each, by which duplicates are told, and the list of those left out
or changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from finetune.config import DataSection, named
from finetune.config.fields import unknown
from finetune.data import cache, chat, fingerprint, formats, lengths, sources
from finetune.data.chat import IGNORE, Encoded
from finetune.data.counts import CONTROL_TOKENS, DUPLICATE, EMPTY, TOO_LONG, UNTRAINED, Affected, Counts
from finetune.data.formats import Example, RowError
from finetune.data.problems import Problems
from finetune.data.rows import RowsWriter, mapped
from finetune.data.sources import Row
from finetune.data.tokenizing import TooMuchText
from finetune.errors import ArtifactError, ConfigError, DataError

Split = Literal["train", "eval"]

# A change to the code that makes other rows of the same data takes a new number, and no earlier entry is found.
_VERSION = 2

_ROWS, _COUNTS = "rows.arrow", "counts.json"

# Read, tokenized and written together: enough for the tokenizer to share among cores, few enough to hold.
_BATCH_ROWS = 256
_BATCH_CHARACTERS = 2**19


@dataclass(frozen=True)
class Prepared:
    """Tokenized splits and counts.

    A split is a `datasets.Dataset` of input_ids, labels, length, number of trained tokens, place and source. There is
    a `warning` where `data.eval: auto` found nothing to hold out.
    """

    train: Any
    eval: Any | None
    train_counts: Counts
    eval_counts: Counts | None
    warning: str | None = None

    @property
    def kind(self) -> str:
        """The kind of example (`formats.kind`) that most training rows are."""
        kinds = self.train_counts.kinds
        return max(kinds, key=kinds.__getitem__)

    def affected(self) -> Iterator[dict[str, Any]]:
        """The rows of both splits that were left out or changed, as lines of data.jsonl."""
        for split, found in (("train", self.train_counts), ("eval", self.eval_counts)):
            for row in found.affected if found else ():
                yield row.as_dict(split)


def prepare(section: DataSection, tokenizer: Any) -> Prepared:
    """Read, format, tokenize and mask both splits, or find them as an earlier start left them (see `cache`).

    Raises DataError for the rows that cannot be read (file:line and field, up to 20), when nothing is left to train, or
    when it would teach nothing: the trained tokens of all rows spell no text; ConfigError where `data.columns` names a
    field that no format has; MachineError where the rows cannot be kept on disk.
    """
    _check_columns(section)
    job = _Job(section, tokenizer)
    problems = Problems()
    train_rows, eval_rows = _splits(section, problems)
    train, train_counts = job.split("train", train_rows, problems)
    where = f"`data.train` ({named(section.train)})"
    if not train_counts.rows:
        raise DataError(
            f"{where} leaves nothing to train: {train_counts.dropped} rows dropped "
            f"({', '.join(f'{rows} {why}' for why, rows in train_counts.dropped_why.items())}), with `data.max_length` "
            f"{section.max_length}, `data.too_long` {section.too_long} and `data.loss_on` {section.loss_on}"
            if train_counts.dropped
            else f"{where} has no rows"
        )
    held_out, eval_counts, warning = None, None, None
    if eval_rows is not None:
        try:
            held_out, eval_counts = _held_out(job)
        except _NothingHeldOut as error:
            if section.eval != "auto":
                raise
            warning = f"none: {error}"
    if not _teaches(train, tokenizer):
        raise DataError(
            f"{where} teaches nothing: in none of its {train_counts.rows} rows do the trained tokens spell any text, "
            "only ends of turn and blanks; check that the answers are not empty, and `data.format`"
        )
    return Prepared(train, held_out, train_counts, eval_counts, warning)


def check_ids(data: Prepared, tokenizer: Any, size: int | None, base: str) -> None:
    """Raise ArtifactError where a row has a token for which `base`, with embeddings for `size` tokens, has none."""
    for rows in (data.train, data.eval):
        if size is None or rows is None or _largest_id(rows) < size:
            continue
        row = next(row for row in rows if max(row["input_ids"], default=0) >= size)
        found = next(id for id in row["input_ids"] if id >= size)
        raise ArtifactError(
            f"{row['place']}: token {found} ({tokenizer.convert_ids_to_tokens(found)!r}) is not among the {size} that "
            f"`{base}` has embeddings for; set `model.tokenizer` to the one that the base was trained with, or another "
            "`data.chat_template`"
        )


def _largest_id(rows: Any) -> int:
    """A second for some 10^9 tokens, as they are mapped into memory."""
    import pyarrow.compute

    return max(
        (pyarrow.compute.max(chunk.flatten()).as_py() or 0 for chunk in rows.data.column("input_ids").chunks), default=0
    )


def prepare_held_out(section: DataSection, tokenizer: Any) -> tuple[Any, Counts]:
    """The held-out split alone. Raises DataError when there is none, or no row of it is left."""
    return _held_out(_Job(section, tokenizer))


def held_out_ids(section: DataSection, tokenizer: Any, rows: int, tokens: int) -> list[list[int]]:
    """Token ids of the first held-out rows (training rows, where none are held out), cut to `tokens`."""
    found = []
    for row in held_out_rows(section):
        example = _read(row, section)
        found.append(_encode(row, example, section, tokenizer).input_ids[:tokens])
        if len(found) == rows:
            break
    return found


def held_out_rows(section: DataSection) -> Iterator[Row]:
    """The held-out rows as they stand in the source; the training rows where nothing is held out."""
    train_rows, eval_rows = _splits(section, Problems())
    anything = False
    for row in eval_rows or ():
        anything = True
        yield row
    if not anything:
        yield from train_rows


def questions(section: DataSection, count: int) -> list[tuple[list[formats.Message] | str, str]]:
    """The first held-out prompts, each with the answer that is to be learnt.

    A prompt is the messages before the last answer, or the text before a completion. Conversations with tools are left
    out, and texts that ask for nothing.
    """
    found: list[tuple[list[formats.Message] | str, str]] = []
    for row in held_out_rows(section):
        match _read(row, section):
            case formats.Chat([*asked, {"role": "assistant", "content": answer}], tools=None):
                prompt: list[formats.Message] | str = asked
            case formats.Completion(prompt, answer):
                pass
            case _:
                continue
        if prompt and answer.strip():
            found.append((prompt, answer))
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

    def side(rows: Iterable[Row], held_out: bool) -> Iterator[Row]:
        below = _held_out_below(section)
        yield from (row for row in rows if (row.share() < below) == held_out)

    return side(train, False), side(sources.rows(section.train, "train", problems), True)


def _held_out_below(section: DataSection) -> float:
    """The share (`Row.share`) below which rows are held out: `eval_share`, unless that leaves one side without a row.

    Then the row with the least or the greatest share is put on it, with those equal to it. Where all rows are equal
    none is held out.
    """
    least, greatest = 1.0, 0.0
    try:
        for row in sources.rows(section.train, "train"):
            share = row.share()
            least, greatest = min(least, share), max(greatest, share)
            if least < section.eval_share <= greatest:  # nearly always within the first few rows
                return section.eval_share
    except DataError:  # told where the rows are read to be prepared
        return section.eval_share
    return min(max(section.eval_share, math.nextafter(least, 1)), greatest) if least < greatest else 0.0


class _NothingHeldOut(DataError):
    """No held-out row is left, though some are asked for."""


def _held_out(job: _Job) -> tuple[Any, Counts]:
    section, problems = job.section, Problems()
    _, rows = _splits(section, problems)
    if rows is None:
        raise DataError("`data.eval: none` keeps nothing back, so there are no held-out rows")
    held_out, counts = job.split("eval", rows, problems)
    if not counts.rows:
        raise _NothingHeldOut(
            f"no held-out row is left (`data.eval: {named(section.eval)}`, share {section.eval_share}, "
            f"{counts.dropped} dropped); set `data.eval` to a file, a larger `data.eval_share`, or `data.eval: none`"
        )
    return held_out, counts


def _teaches(rows: Any, tokenizer: Any) -> bool:
    """Whether some row's trained tokens spell text; the first one usually does, so few rows are looked at."""
    return any(
        tokenizer.decode([label for label in row["labels"][1:] if label != IGNORE], skip_special_tokens=True).strip()
        for row in rows
    )


# -- a split on disk -------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """What decides the rows of both splits."""

    section: DataSection
    tokenizer: Any

    def split(self, split: Split, rows: Iterable[Row], problems: Problems) -> tuple[Any, Counts]:
        """The tokenized `rows` and their counts, from the cache where they are there. Raises as `prepare` does."""

        def fill(folder: Path) -> None:
            counts = Counts()
            with RowsWriter(folder / _ROWS) as writer:
                _Rows(self.section, self.tokenizer, problems, counts, writer).take(rows)
            with cache.writing():
                (folder / _COUNTS).write_text(json.dumps(asdict(counts)), encoding="utf-8")

        folder = cache.entry(lambda: self._key(split), fill)
        found = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
        counts = Counts(**{**found, "affected": [Affected(**row) for row in found["affected"]]})
        return mapped(folder / _ROWS), counts

    def _key(self, split: Split) -> str | None:
        """All that decides the split's rows, as one hash; None where the content of a source is not known."""
        of_its_own = split == "eval" and self.section.eval != "auto"
        contents = sources.contents(self.section.eval if of_its_own else self.section.train)
        if contents is None:
            return None
        settings = self.section.model_dump(mode="json", exclude={"packing"})  # which changes no row
        libraries = [version(name) for name in ("transformers", "tokenizers", "jinja2")]
        parts = [_VERSION, split, contents, settings, self._spelling, libraries]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _spelling(self) -> list[Any]:
        known = [fingerprint.of(self.tokenizer), getattr(self.tokenizer, "split_special_tokens", False)]
        if self.tokenizer.is_fast:
            return known
        # Of one that is written in Python the vocabulary does not tell all.
        return [*known, type(self.tokenizer).__name__, json.dumps(self.tokenizer.init_kwargs, default=str)]


@dataclass
class _Read:
    """A row of the source, or what is wrong with it, and how many problems had been told when it was read."""

    row: Row
    example: Example | DataError
    at: int

    @property
    def characters(self) -> int:
        """About so many, or tokens."""
        match self.example:
            case formats.Chat(messages, tools=tools):
                return _characters([messages, tools])
            case formats.Completion(prompt, completion):
                return len(prompt) + len(completion)
            case formats.Text(text):
                return len(text)
            case formats.Tokens(input_ids):
                return len(input_ids)
        return 0


def _characters(value: Any) -> int:
    """Of all texts within."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return sum(map(_characters, inner))


@dataclass
class _Rows:
    """The rows of one split on their way to disk."""

    section: DataSection
    tokenizer: Any
    problems: Problems
    counts: Counts
    writer: RowsWriter
    forms: dict[str, str] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    last: tuple[str, bool] = ("", False)

    def take(self, rows: Iterable[Row]) -> None:
        """Tokenize, count and write them. Raises BadRows with all problems, in the order of the rows."""
        with self.problems:
            for batch in self._batches(rows):
                self.writer.write(list(self._kept_of(batch)))
                self.problems.stop_at(len(self.problems.found))

    def _batches(self, rows: Iterable[Row]) -> Iterator[list[_Read]]:
        batch: list[_Read] = []
        characters = 0
        try:
            for row in rows:
                batch.append(_Read(row, self._read(row), len(self.problems.found)))
                characters += batch[-1].characters
                if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
                    yield batch
                    batch, characters = [], 0
        except DataError:  # at which reading ends; the rows before it may have problems of their own
            yield batch
            raise
        yield batch

    def _read(self, row: Row) -> Example | DataError:
        try:
            if row.source not in self.forms:
                form = self.section.format
                self.forms[row.source] = _detect(row, self.section) if form == "auto" else form
            example, unused = _example(row, self.forms[row.source], self.section)
        except DataError as error:
            return error
        if isinstance(example, formats.Chat):
            unused += [f"messages.{name}" for name in chat.unused(example, self.tokenizer)]
        self.counts.unused += [name for name in unused if name not in self.counts.unused]
        return example

    def _kept_of(self, batch: list[_Read]) -> Iterator[tuple[Row, Encoded]]:
        loss_on, told = self.section.loss_on, len(self.problems.found)
        full = {
            place: read.example
            for place, read in enumerate(batch)
            if not isinstance(read.example, DataError) and not chat.is_empty(read.example, loss_on)
        }
        rows = chat.encode_all(list(full.values()), self.tokenizer, loss_on, self.section.control_tokens)
        encoded = dict(zip(full, rows, strict=True))
        if lengths.TOO_LONG[self.section.too_long].keeps_head:
            encoded |= self._with_heads(full, encoded)
        for place, read in enumerate(batch):
            try:
                for kept in self._kept(read, encoded.get(place)):
                    self.counts.add(len(kept.input_ids), kept.trained, formats.kind(full[place]))
                    yield read.row, kept
            except DataError as error:
                # Problems met while later rows were read have been told already, and stand behind this one.
                self.problems.add(error, at=read.at + len(self.problems.found) - told)

    def _with_heads(
        self, full: dict[int, Example], encoded: dict[int, Encoded | RowError]
    ) -> dict[int, Encoded | RowError]:
        """Those that are too long, with the length of their head."""
        long = {
            place: row
            for place, row in encoded.items()
            if isinstance(row, Encoded) and len(row.input_ids) > self.section.max_length
        }
        rows = [(full[place], row) for place, row in long.items()]
        heads = chat.system_heads(rows, self.tokenizer, self.section.control_tokens)
        return {place: replace(row, head=head) for (place, row), head in zip(long.items(), heads, strict=True)}

    def _kept(self, read: _Read, encoded: Encoded | RowError | None) -> list[Encoded]:
        """What a row of the source is trained as: one row, pieces of it, or none. What is done to it is counted."""
        place, section, affected = read.row.place, self.section, self.counts.affected
        if isinstance(read.example, DataError):
            raise read.example
        if encoded is None:
            affected.append(Affected(place, "dropped", EMPTY))
            return []
        if isinstance(encoded, TooMuchText) and lengths.TOO_LONG[section.too_long].blind:
            affected.append(Affected(place, "dropped", TOO_LONG))
            return []
        if isinstance(encoded, RowError):
            raise DataError(f"{place}: {encoded}")
        length = len(encoded.input_ids)
        if not encoded.trained:
            affected.append(Affected(place, "dropped", UNTRAINED, length))
            return []
        if encoded.escaped:
            affected.append(Affected(place, "kept", CONTROL_TOKENS, length))
        if self._again(place, encoded):
            what = "dropped" if section.duplicates == "drop" else "kept"
            affected.append(Affected(place, what, DUPLICATE, length))
            if what == "dropped":
                return []
        if length <= section.max_length:
            return [encoded]
        try:
            what, pieces = lengths.TOO_LONG[section.too_long].apply(encoded, section.max_length)
        except RowError as error:
            raise DataError(f"{place}: {error}") from None
        trained = [piece for piece in pieces if piece.trained]
        affected.append(Affected(place, what if trained else "dropped", TOO_LONG, length))
        return trained

    def _again(self, place: str, encoded: Encoded) -> bool:
        """Whether an earlier row has the same tokens and labels, by 64-bit hashes.

        A weight gives a row several times, one after the other: it is no duplicate of itself.
        """
        if place != self.last[0]:
            content = hash((tuple(encoded.input_ids), tuple(encoded.labels)))
            self.last = place, content in self.seen
            self.seen.add(content)
        return self.last[1]


# -- rows of a source ------------------------------------------------------------------------------------------------


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


def _read(row: Row, section: DataSection) -> formats.Example:
    return _example(row, section.format, section)[0]


def _example(row: Row, form: str, section: DataSection) -> tuple[formats.Example, list[str]]:
    try:
        return formats.read(row.fields, form, section.columns)
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None


def _encode(row: Row, example: formats.Example, section: DataSection, tokenizer: Any) -> Encoded:
    try:
        return chat.encode(example, tokenizer, section.loss_on, section.control_tokens)
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None
