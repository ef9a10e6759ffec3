"""`finetune data`: a job's data as the model will see it, on a terminal or in a log, as a page, and in a notebook.

Reads the data and the tokenizer, but no weights. The first line is the summary. Characters without a glyph, such as a
tab, an escape or a zero-width space, are escaped: they are tokens too, and often the mistake one is looking for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.config import inline
from finetune.config.field_types import source_name
from finetune.data.counts import CONTROL_TOKENS, Counts
from finetune.data.examples import in_common
from finetune.data.inspection import Batching, Inspection
from finetune.report import printing, words
from finetune.report.view import PageView
from finetune.storage.records import Sample, TokenText

# Pieces of a long run of tokens that a terminal shows at either end; a page shows all.
_SHOWN_PIECES = 40
_TRAINED, _CONTEXT = "green", "dim"
_SIDE_BY_SIDE = 100
"""Columns of a terminal from which on both answers of a pair are shown side by side."""


@dataclass(frozen=True, repr=False)
class DataView(PageView):
    """An inspection of a job's data: counts, row lengths, batchings, and some rows token by token."""

    inspection: Inspection

    template = "data.html.j2"

    def title(self) -> str:
        return "A look at the data"

    def as_dict(self) -> dict[str, Any]:
        return self.inspection.as_dict()

    @property
    def headline(self) -> str:
        """The summary of the training rows, in one line."""
        counts = self.inspection.train
        return (
            f"{words.count(counts.rows)} rows teach {words.count(counts.trained_tokens)} of "
            f"{words.count(counts.tokens)} tokens ({words.share(counts.supervised_share)})"
        )

    def show(self, console: Console) -> None:
        """Print the summary, the tables, and the first rows; of a long row, both ends."""
        data = self.inspection
        printing.say(console, self.headline, style="bold green")
        printing.facts(console, _facts(data))
        printing.table(console, *_splits_table(data))
        printing.say(console)
        printing.table(console, *_sources_table(data))
        printing.say(console)
        printing.say(console, "training rows by length in tokens", style="bold")
        printing.bars(console, _lengths(data))
        printing.say(console)
        printing.table(console, *_batchings_table(data), texts=("micro-batch", ""))
        coloured = console.color_system is not None and not console.no_color
        marks = ("", "") if coloured else ("⟦", "⟧") if printing.knows_unicode(console) else ("[[", "]]")
        legend = "trained tokens in green" if coloured else f"trained tokens in {marks[0]} {marks[1]}"
        printing.say(console)
        printing.say(console, f"the first rows as the model sees them, {legend}", style="bold")
        for rows in _together(data):
            shown = [_lines(caption, sample, console, marks) for caption, sample in rows]
            if len(shown) == 1 or console.width < _SIDE_BY_SIDE:
                for text in itertools.chain.from_iterable(shown):
                    printing.put(console, text, whole=True)
            else:
                beside = Table.grid(padding=(0, 2), expand=True)
                for _ in shown:
                    beside.add_column(ratio=1, overflow="fold")
                beside.add_row(*(Text("\n").join(lines) for lines in shown))
                printing.put(console, beside)

    def values(self) -> dict[str, Any]:
        """The same for the template. On a phone, the table of batchings has no room for a column that one row fills."""
        data = self.inspection
        head, batchings = _batchings_table(data)
        return {
            "headline": self.headline,
            "facts": list(_facts(data).items()),
            "splits": _splits_table(data),
            "sources": _sources_table(data),
            "lengths": _lengths(data),
            "batchings": (
                head[:-1],
                [(f"{name} ({mark})" if mark else name, *cells) for name, *cells, mark in batchings],
            ),
            "samples": spelt(_together(data)),
        }

    def __repr__(self) -> str:
        return f"<data: {self.headline}>"


# -- facts and tables --------------------------------------------------------------------------------------------------


def _facts(data: Inspection) -> dict[str, str]:
    shown = {}
    if splits := words.splits(data.splits):
        shown["splits"] = splits

    if data.batches.worst_batch.packed:
        at_once = "packed"
    elif data.batches.micro_batch_tokens:
        at_once = f"micro-batches of at most {words.count(data.batches.micro_batch_tokens)} tokens"
    elif data.batches.micro_batch == "auto":
        at_once = "micro-batch is auto: counted as one"
    else:
        at_once = f"micro-batch {words.count(data.batches.micro_batch)}"
    shown["batch"] = f"{words.count(data.batches.batch_size)} rows a step, {at_once}"
    shown["largest batch"] = f"{words.batch(data.batches.worst_batch)}; the longest row is {data.rows.longest_place}"

    if data.warning:
        shown["evaluation set"] = data.warning
    elif data.eval and not data.judges:
        shown["evaluation set"] = words.TOO_FEW_TO_JUDGE
    if prompts := words.prompts(data.plain_text.separator, data.train, data.eval):
        shown["prompts"] = prompts
    for name, counts in _splits(data).items():
        if counts.dropped:
            shown[f"dropped, {name}"] = words.dropped(counts)
        if counts.places(why=CONTROL_TOKENS):
            shown[f"control tokens, {name}"] = words.control_tokens(counts)
    if unused := words.unused(data.train, data.eval):
        shown["columns not used"] = unused
    return {**shown, "fingerprint": f"{data.fingerprint} (tokenizer and template)"}


def _splits(data: Inspection) -> dict[str, Counts]:
    return {"training": data.train} | ({"evaluation": data.eval} if data.eval else {})


def _splits_table(data: Inspection) -> printing.Cells:
    splits = {name: counts.as_dict() for name, counts in _splits(data).items()}
    numbers = {
        "rows": "rows", "tokens": "tokens", "trained tokens": "trained_tokens", "share trained": "supervised_share",
        "longest row": "longest", "truncated": "truncated", "split": "split", "duplicates": "duplicates",
        "dropped": "dropped",
    }  # fmt: skip
    rows = []
    for name, number in numbers.items():
        written = words.share if number == "supervised_share" else words.count
        rows.append((name, *(written(facts[number]) for facts in splits.values())))
    return ("", *splits), rows


def _sources_table(data: Inspection) -> printing.Cells:
    rows = [
        (source_name(source.name), words.count(source.rows), words.count(source.tokens),
         words.share(source.tokens / data.train.tokens))
        for source in data.rows.sources
    ]  # fmt: skip
    return ("source", "rows", "tokens", "of all tokens"), rows


def _batchings_table(data: Inspection) -> printing.Cells:
    def size(batching: Batching) -> str:
        tokens = batching.changes.get("training.micro_batch_tokens")
        return f"{words.count(tokens)} tokens" if tokens else "by rows"

    rows = [
        (batching.name, words.share(batching.padding_share), words.count(batching.steps),
         words.count(batching.micro_batches), size(batching), "configured" if batching.configured else "")
        for batching in data.batches.batchings
    ]  # fmt: skip
    return ("batching", "padding", "steps", "passes", "micro-batch", ""), rows


def _lengths(data: Inspection) -> list[tuple[str, float, str, str]]:
    """(range of lengths, fraction of the longest bar, rows, share of all rows) for each bin."""
    most = max(these.rows for these in data.rows.lengths)
    return [
        (f"{words.count(these.first)} to {words.count(these.last)}", these.rows / most, words.count(these.rows),
         words.share(these.rows / data.train.rows))
        for these in data.rows.lengths
    ]  # fmt: skip


# -- rows --------------------------------------------------------------------------------------------------------------


SpeltRow = tuple[str, list[tuple[str, bool]], list[tuple[str, str, str]], str]


def spelt(groups: Iterable[list[tuple[str, Sample]]]) -> list[list[SpeltRow]]:
    """Rows for a page, in groups that stand beside each other.

    Of each its caption, pieces as (text, trained), images as (JPEG in base64, name, size), and a remark on others.
    """
    return [
        [
            (
                caption,
                [(_spelt(piece, "↵"), piece.trained) for piece in sample.pieces],
                [(image.thumbnail, image.name, words.image_size(image)) for image in sample.images],
                _further(sample),
            )
            for caption, sample in rows
        ]
        for rows in groups
    ]


def _further(sample: Sample) -> str:
    left_out = sample.images_shown - len(sample.images)
    return f"and {words.count(left_out)} more image{'s' * (left_out > 1)}" if left_out > 0 else ""


def _together(data: Inspection) -> Iterator[list[tuple[str, Sample]]]:
    """The first rows with their captions; if all are plain text, the first once more in the chat template."""
    yield from together(data.samples, [*data.train.segments])
    if as_chat := data.plain_text.as_chat:
        changes = " and ".join(f"`{key}: {inline(value)}`" for key, value in as_chat.changes.items())
        caption = f"{_caption(as_chat.sample)}, if {changes} made the rows turns of the chat template"
        yield [(caption, as_chat.sample)]


def together(samples: Sequence[Sample], names: Sequence[str]) -> Iterator[list[tuple[str, Sample]]]:
    """The samples with their captions, as they stand beside each other.

    Of a row of the several segments `names`, what all begin with comes first, alone, and then the rest of each.
    """
    if len(names) < 2:
        yield from ([(_caption(sample), sample)] for sample in samples)
        return
    for at in range(0, len(samples), len(names)):
        row = samples[at : at + len(names)]
        starts = [
            next((n for n, piece in enumerate(each.pieces) if piece.trained), 0) for each in row if each.trained_tokens
        ]
        shared = min([in_common(row[0].pieces, each.pieces) for each in row[1:]] + starts)
        location = row[0].place.removesuffix(f", {names[0]}")
        prompt = replace(row[0], pieces=row[0].pieces[:shared])
        yield [(f"{location}: what {' and '.join(names)} begin with", prompt)]
        yield [(_caption(each), replace(each, pieces=each.pieces[shared:])) for each in row]


def _lines(caption: str, sample: Sample, console: Console, marks: tuple[str, str]) -> list[Text]:
    """A row below its caption and what is known of its images.

    Each run of trained tokens is enclosed in the marks, and a long run is shown by both its ends.
    """
    line_break = "↵" if printing.knows_unicode(console) else "\\n"
    row = Text()
    for trained, run in groupby(sample.pieces, key=lambda piece: piece.trained):
        tokens = [_spelt(piece, line_break) for piece in run]
        if (left_out := len(tokens) - 2 * _SHOWN_PIECES) > 0:
            tokens[_SHOWN_PIECES:-_SHOWN_PIECES] = [f" ... {words.count(left_out)} more ... "]
        opening, closing = marks if trained else ("", "")
        style = _TRAINED if trained else _CONTEXT
        row.append_text(printing.plain(console, f"{opening}{''.join(tokens)}{closing}", style, keep="\n"))
    row.rstrip()
    known = [f"{image.name}: {words.image_size(image)}" for image in sample.images] + [_further(sample)]
    above = [printing.plain(console, line, _CONTEXT) for line in (caption, *filter(None, known))]
    return [above[0], *(Text.assemble("    ", line) for line in (*above[1:], *row.split("\n")))]


def _caption(sample: Sample) -> str:
    return f"{sample.place}: {words.count(sample.tokens)} tokens, {words.count(sample.trained_tokens)} trained"


def _spelt(piece: TokenText, line_break: str) -> str:
    """The piece's text with characters without a glyph escaped; `line_break` marks the end of a line."""
    return "".join(
        f"{line_break}\n" if letter == "\n"
        else letter if letter.isprintable()
        else letter.encode("unicode_escape").decode("ascii")
        for letter in piece.text
    )  # fmt: skip
