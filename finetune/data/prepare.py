"""Prepares the data section's rows: two data sets of token ids and labels, with statistics of dropped rows."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from finetune.config import DataSection, ModelSection, Source, entries, named
from finetune.config.field_types import GIVEN, unknown
from finetune.data import chat, formats, in_memory, labelled, sources
from finetune.data.counts import Counts
from finetune.data.encoded import ANSWER, DESIRABLE, IGNORE, MEDIA, MEDIA_SIZES, TEACHER, RowLayout, Segment, columns
from finetune.data.examples import Chat, Completion, Content, Example, Several, Unusable, media_in, parts
from finetune.data.media import TEXT_ALONE, Media, Shown
from finetune.data.mismatched import OnePrompt
from finetune.data.prepared_writer import Preparation, located
from finetune.data.problems import Problems
from finetune.data.rows import RowTable
from finetune.data.sources import Row
from finetune.data.splits import SplitUse
from finetune.errors import ArtifactError, ConfigError, DataError

ROWS_TO_JUDGE = 10
"""Fewest different held-out rows whose loss chooses an adapter; that of fewer depends more on the rows than on it."""

_SEQUENCES = ("input_ids", "labels", "segments", "shared", MEDIA, MEDIA_SIZES, *TEACHER)

# Of this many rows, holding out a fifth leaves enough to judge by.
_ROWS_TO_SPARE_SOME = 5 * ROWS_TO_JUDGE


@dataclass(frozen=True)
class Prepared:
    """Tokenized splits and their statistics.

    A split is a `RowTable` of input_ids, labels, length, trained (number of tokens), place and source; where
    the layout has any, also the lengths of a row's `segments` and the number of tokens that they have `shared`, and its
    values by name. A `warning` is set if `data.eval: auto` found nothing to hold out. `media` is what the rows may show
    beside text: images as the base takes them, or nothing. `splits` says what is read of sources that have several.
    """

    train: RowTable
    eval: RowTable | None
    train_counts: Counts
    eval_counts: Counts | None
    warning: str | None = None
    media: Media = TEXT_ALONE
    splits: tuple[SplitUse, ...] = ()

    @property
    def kind(self) -> str:
        """The most frequent kind of example (`examples.kind`) among the training rows."""
        kinds = self.train_counts.traits.kinds
        return max(kinds, key=kinds.__getitem__)

    @property
    def layout(self) -> RowLayout:
        """The names of the rows' segments and values, and 1 if they have a teacher's."""
        named, there = tuple(self.train_counts.segments), columns(self.train)
        values = tuple(name for name in there if name not in _SEQUENCES)
        return RowLayout(named, values, teacher=int(TEACHER[0] in there))

    @property
    def judges(self) -> bool:
        """Whether the evaluation set has enough different rows to choose an adapter by."""
        different: set[tuple[Any, ...]] = set()
        for row in self.eval or ():
            different.add((*row["input_ids"], *(image["digest"] for image in row.get(MEDIA, ()))))
            if len(different) == ROWS_TO_JUDGE:
                return True
        return False

    def affected(self) -> Iterator[dict[str, Any]]:
        """Dropped and changed rows of both splits, as records of data.jsonl."""
        for split, counts in (("train", self.train_counts), ("eval", self.eval_counts)):
            for row in counts.affected if counts else ():
                yield {"split": split, **asdict(row)}


def media_of(model: ModelSection, data: DataSection, tokenizer: Any, architecture: Any = None) -> Media:
    """What rows of a job may show beside their text; the `architecture` is loaded if it is not given.

    Raises as `vision.of` does.
    """
    if model.vision == "none":
        return TEXT_ALONE
    from finetune.data import vision  # imports torch, which rows of text do not need
    from finetune.model.base import load_architecture

    return vision.of(model, data.image_pixels, architecture or load_architecture(model), tokenizer)


def prepare(section: DataSection, tokenizer: Any, media: Media = TEXT_ALONE) -> Prepared:
    """Read, format, tokenize and mask the training and the evaluation rows, or load them from the cache (see `cache`).

    Rows with images are refused unless they are among the job's `media`.
    Raises DataError for rows that cannot be read (file:line and field, up to 20), if nothing is left to train, or if
    the trained tokens of all rows contain no text; ConfigError if `data.columns` names a field that no format has;
    MachineError if the rows cannot be written to disk.
    """
    check_columns(section)
    preparation = Preparation(section, tokenizer, media)
    problems = Problems()
    train_rows, _ = _train_and_held_out(preparation, problems)
    train, train_counts = preparation.prepared("train", train_rows, problems)
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
    if section.eval != "none":
        try:
            held_out, eval_counts = _held_out(preparation)
        except (_NothingHeldOut, OnePrompt) as error:
            if section.eval != "auto":
                raise
            one_prompt = (
                "the rows that `data.eval: auto` holds out answer one prompt, and are not trained either; set "
                "`data.eval_share` to hold out more, or `data.eval: none` to train them"
            )
            warning = f"none: {one_prompt if isinstance(error, OnePrompt) else error}"
    if eval_counts and eval_counts.segments.keys() != train_counts.segments.keys():
        raise DataError(f"{where} and `data.eval` ({named(section.eval)}) have rows of different segments")
    # The trained tokens of any row, or those before a scored one, must hold text. The first row usually does.
    scored = section.loss_on == "end"
    learnt = (
        row["input_ids"] if scored else [label for label in row["labels"][1:] if label != IGNORE] for row in train
    )
    if not any(tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in learnt):
        raise DataError(
            f"{where} teaches nothing: the trained tokens of its {train_counts.rows} rows contain no text, only "
            "end-of-turn tokens and white space; check that the answers are not empty, and `data.format`"
        )
    splits = []
    for use in sources.split_uses(section):
        if use.use != "none":
            import pyarrow.compute

            rows, own = train if use.use == "train" else held_out, 0
            if rows:
                own = pyarrow.compute.sum(pyarrow.compute.equal(rows.table.column("source"), use.source)).as_py() or 0
            use = replace(use, rows=own)
        splits.append(use)
    return Prepared(train, held_out, train_counts, eval_counts, warning, media, tuple(splits))


def _train_and_held_out(preparation: Preparation, problems: Problems) -> tuple[Iterable[Row], Iterable[Row] | None]:
    """Training and held-out rows; problems with either are added to `problems` and raised after the last row."""
    section = preparation.section
    train = sources.rows(section.train, "train", problems, section.encoding)
    if section.eval == "none":
        return train, None
    if section.eval != "auto":
        sources.refuse_shared(section.train, section.eval)
        return train, sources.rows(section.eval, "eval", problems, section.encoding)
    own: list[str | Source] = [
        entry for entry in entries(section.train) if sources.kind_of(entry.source).holds_out(entry.source)
    ]
    sources.refuse_shared(section.train, own)
    held_out = sources.rows(own, "eval", problems, section.encoding)
    drawn_from = {entry.source for entry in entries(section.train)} - {entry.source for entry in entries(own)}
    if not drawn_from:
        return train, held_out

    def side(rows: Iterable[Row], *, drawn: bool) -> Iterator[Row]:
        below = _held_out_below(section, drawn_from, preparation.trains)
        yield from (row for row in rows if (row.source in drawn_from and row.share() < below) == drawn)

    again = sources.rows(section.train, "train", problems, section.encoding)
    return side(train, drawn=False), itertools.chain(held_out, side(again, drawn=True))


_TRIED_ROWS = 256


def _held_out_below(section: DataSection, drawn_from: set[str], trains: Callable[[Row], bool]) -> float:
    """The value of `Row.share` below which rows of the sources `drawn_from` are held out: `eval_share`, or more for ten
    different rows.

    Of fewer than fifty different rows, ten are too many to spare; then it is `eval_share` unless that leaves one split
    empty, and the row with the smallest or largest value, and any equal to it, is moved to that split. If all rows are
    equal, none is held out. Rows without trained tokens do not count; only the first `_TRIED_ROWS` are tokenized to
    find out.
    """
    share = section.eval_share
    least: list[float] = []  # the smallest values, in order
    different: set[float] = set()
    greatest = 0.0
    try:
        rows = (row for row in sources.rows(section.train, encoding=section.encoding) if row.source in drawn_from)
        for number, row in enumerate(rows):
            value = row.share()
            matters = len(least) < ROWS_TO_JUDGE or value < least[-1] or value > greatest
            if value in different or not (matters or len(different) < _ROWS_TO_SPARE_SOME):
                continue
            if number < _TRIED_ROWS and not trains(row):
                continue
            greatest = max(greatest, value)
            if value not in least:
                least = sorted([*least, value])[:ROWS_TO_JUDGE]
            if len(different) < _ROWS_TO_SPARE_SOME:
                different.add(value)
            # With the usual share, this is known within a few hundred rows.
            if len(different) == _ROWS_TO_SPARE_SOME and least[-1] < share <= greatest:
                return share
    except DataError:  # raised again where the rows are prepared
        return share
    if len(different) < _ROWS_TO_SPARE_SOME:
        least = least[:1]
    return min(max(share, math.nextafter(least[-1], 1)), greatest) if least and least[0] < greatest else 0.0


class _NothingHeldOut(DataError):
    """The evaluation set is empty, though one was requested."""


def _held_out(preparation: Preparation) -> tuple[Any, Counts]:
    section, problems = preparation.section, Problems()
    _, rows = _train_and_held_out(preparation, problems)
    if rows is None:
        raise DataError("there are no held-out rows, because `data.eval` is `none`")
    held_out, counts = preparation.prepared("eval", rows, problems)
    if not counts.rows:
        raise _NothingHeldOut(
            f"no held-out row is left (`data.eval: {named(section.eval)}`, share {section.eval_share}, "
            f"{counts.dropped} dropped); set `data.eval` to a file, a larger `data.eval_share`, or `data.eval: none`"
        )
    return held_out, counts


def classes(section: DataSection) -> list[str]:
    """The classes of a classifier: those that the config names, or those of all training rows.

    Raises DataError for rows that cannot be read or have no class, and if all have the same; ConfigError for classes
    that the config names and that are too few, or equal.
    """
    if own := section.labels:
        if len({*own}) < max(2, len(own)):
            raise ConfigError("`data.labels` must be two or more different classes; remove it for those of the rows")
        return own
    problems, names = Problems(), set[str]()
    with problems:
        for row in sources.rows(section.train, "train", problems, section.encoding):
            try:
                with located(row):
                    content, _ = formats.read(row.fields, section.format, section.columns, section.separator)
            except DataError as error:
                problems.add(error)
                continue
            names |= {content.label} if isinstance(content, Several) and content.label is not None else set()
    if len(names) < 2:
        found = f"all have the same `label`, `{names.pop()}`" if names else "none has a `label`"
        raise DataError(
            f"`data.train` ({named(section.train)}): of its rows {found}; a classifier needs two classes or more"
        )
    return labelled.in_order(names)


def check_ids(data: Prepared, tokenizer: Any, size: int | None, base: str) -> None:
    """Raise ArtifactError if a row has a token id beyond the `size` embeddings of `base`."""
    import pyarrow.compute

    for rows in (data.train, data.eval):
        if size is None or rows is None:
            continue
        # About a second for 10^9 memory-mapped tokens.
        ids = rows.table.column("input_ids").chunks
        if max((pyarrow.compute.max(chunk.flatten()).as_py() or 0 for chunk in ids), default=0) < size:
            continue
        row = next(row for row in rows if max(row["input_ids"], default=0) >= size)
        token = next(id for id in row["input_ids"] if id >= size)
        raise ArtifactError(
            f"{row['place']}: token {token} ({tokenizer.convert_ids_to_tokens(token)!r}) is not among the {size} that "
            f"`{base}` has embeddings for; set `model.tokenizer` to the one the base was trained with, or choose "
            "another `data.chat_template`"
        )


def prepare_held_out(section: DataSection, tokenizer: Any, media: Media = TEXT_ALONE) -> tuple[Any, Counts]:
    """Prepare only the held-out split. Raises DataError if there is none, or if all its rows were dropped."""
    return _held_out(Preparation(section, tokenizer, media))


HELD_OUT = "the evaluation set"


def _shows(content: Content) -> bool:
    return any(map(media_in, parts(content)))


class ComparedRows(NamedTuple):
    """Token ids, labels and images of the rows of a proof, and a name for these rows."""

    ids: list[list[int]]
    labels: list[list[int]]
    shown: Shown
    name: str


def compared_rows(
    section: DataSection, tokenizer: Any, rows: int, tokens: int, note: Callable[[str], None],
    media: Media = TEXT_ALONE,
) -> ComparedRows:  # fmt: skip
    """The first held-out rows (else training rows) for the proof of an export; built-in rows if the rows are not here.

    Of one segment each, cut to `tokens` unless they show images: to the first ones, or to the last ones of rows that
    are scored. With a base that sees, rows with images and without take half of the places each, if there are as many.
    """
    if is_here(section):
        name = HELD_OUT if holds_out(section, tokenizer, media) else "the training rows"
        seeing = media
    else:
        note("the rows were given from Python and are not kept on disk: the built-in ones are compared instead")
        section = DataSection(
            chat_template=section.chat_template, control_tokens=section.control_tokens, loss_on=section.loss_on
        )
        name, seeing = "the built-in rows", TEXT_ALONE
    examples = _held_out_examples(section, tokenizer, seeing)
    if seeing:
        shown: list[tuple[Row, Content]] = []
        of_text: list[tuple[Row, Content]] = []
        for row, content in itertools.islice(examples, _TRIED_ROWS):
            (shown if _shows(content) else of_text).append((row, content))
        examples = iter([*shown[: rows // 2], *of_text, *shown[rows // 2 :]])
    else:
        examples = itertools.islice(examples, rows)
    segments: list[Segment] = []
    for row, content in examples:
        with located(row):
            content = seeing.measured(content, row.folder)
            segment = chat.encode(content, tokenizer, section.loss_on, section.control_tokens).segments[0]
        if not segment.media:
            # Of a scored row, the end matters.
            segment = segment.cut(tokens, max(0, len(segment.input_ids) - tokens) if segment.scored else 0)
        elif len(segment.input_ids) > section.max_length:  # left out in training as well
            continue
        segments.append(segment)
        if len(segments) == rows:
            break
    ids, labels = ([getattr(segment, part) for segment in segments] for part in ("input_ids", "labels"))
    return ComparedRows(ids, labels, Shown(media, [segment.media for segment in segments]), name)


def is_here(section: DataSection) -> bool:
    """Whether this process has the rows and the format that were given from Python."""
    named = [entry.source for several in (section.train, section.eval) for entry in entries(several)]
    lost = any(source.startswith(GIVEN) and not in_memory.is_here(source) for source in named)
    return not lost and (section.format in formats.FORMATS or section.format == "auto")


def holds_out(section: DataSection, tokenizer: Any, media: Media = TEXT_ALONE) -> bool:
    """Whether any row is held out."""
    _, rows = _train_and_held_out(Preparation(section, tokenizer, media), Problems())
    return next(iter(rows or ()), None) is not None


class Question(NamedTuple):
    """A held-out row, its conversation or text up to the last answer, and that answer."""

    row: Row
    prompt: Chat | Completion
    reference: str


def questions(section: DataSection, tokenizer: Any, media: Media = TEXT_ALONE) -> Iterator[Question]:
    """The held-out rows (training rows if none are held out) that end with an answer in words.

    The answer of a pair is the chosen one. Plain texts, conversations with tools, and answers that are not trained or
    are labelled undesirable are left out, and without `media` conversations with images.
    """
    for row, content in _held_out_examples(section, tokenizer, media):
        if _shows(content):
            if not media:
                continue
            with located(row):
                content = media.measured(content, row.folder)
        example: Example | None
        if isinstance(content, Several):  # the answer to prefer, if the row has one
            example = content.segments.get(ANSWER if content.values.get(DESIRABLE) else "chosen")
        else:
            example = content
        match example:
            case Chat([*asked, {"role": "assistant", "content": reference, **rest}], context, tools=None) if asked:
                if reference.strip() and not rest.get("tool_calls") and len(asked) not in context:
                    yield Question(row, Chat(asked, images=example.images), reference)
            case Completion(text, reference) if text and reference.strip():
                yield Question(row, replace(example, completion=""), reference)


def _held_out_examples(
    section: DataSection, tokenizer: Any, media: Media = TEXT_ALONE
) -> Iterator[tuple[Row, Content]]:
    for row in held_out_rows(section, tokenizer, media):
        with located(row), contextlib.suppress(Unusable):
            yield row, formats.read(row.fields, section.format, section.columns, section.separator)[0]


def held_out_rows(section: DataSection, tokenizer: Any, media: Media = TEXT_ALONE) -> Iterator[Row]:
    """The held-out rows as read from the source; the training rows if nothing is held out."""
    train_rows, eval_rows = _train_and_held_out(Preparation(section, tokenizer, media), Problems())
    held_out = iter(eval_rows or ())
    first = next(held_out, None)
    yield from train_rows if first is None else itertools.chain([first], held_out)


def check_columns(section: DataSection) -> None:
    """Raise ConfigError if `data.columns` names a field that no format has."""
    known = formats.known_fields(section.format)
    for name in section.columns:
        if name not in known:
            raise ConfigError(
                f"`data.columns`: the format `{section.format}` has no such field: {unknown(name, known)}"
            )
