"""`finetune data`: a job's data as the model will see it, on a terminal or in a log, as a page, and in a notebook.

Reads the data and the tokenizer, but no weights. The first line is the summary. Characters without a glyph, such as a
tab, an escape or a zero-width space, are escaped: they are tokens too, and often the mistake one is looking for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from finetune.config import Config, inline, loaded
from finetune.config.field_types import source_name
from finetune.data import inspection
from finetune.data.inspection import Batching, Inspection
from finetune.data.prepare import Counts
from finetune.model import bounds
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report import pages, printing, words
from finetune.runtime import libraries
from finetune.storage.files import write_text
from finetune.storage.records import Sample, TokenText

# Of a long run, a terminal shows this many pieces at either end; a page shows all.
_SHOWN_PIECES = 40
_TRAINED, _CONTEXT = "green", "dim"


@dataclass(frozen=True, repr=False)
class DataLook:
    """An inspection of a job's data: as a dict, as a page, or in a notebook as tables and rows."""

    inspection: Inspection

    def as_dict(self) -> dict[str, Any]:
        """The inspection as JSON values."""
        return self.inspection.as_dict()

    def write(self, path: Path) -> None:
        """Write a self-contained HTML page. Raises MachineError if it cannot be written."""
        write_text(path, page(self.inspection))

    def __str__(self) -> str:
        return printing.text(lambda console: show(self.inspection, console))

    def __repr__(self) -> str:
        return f"<data: {headline(self.inspection)}>"

    def _repr_html_(self) -> str:
        return html(self.inspection)


def inspect_data(config: Config) -> DataLook:
    """Inspect the data that the job would train on: counts, lengths, padding, and the first rows token by token.

    Raises a FinetuneError for anything the user can fix; DataError also if there is nothing to learn.
    """
    libraries.quiet()
    config, _ = bounds.within_known_positions(loaded(config))
    tokenizer = load_tokenizer(config.model, config.data.chat_template)
    return DataLook(inspection.inspect(config.data, config.training, tokenizer))


def show(found: Inspection, console: Console) -> None:
    """Print the summary, row lengths, batchings, and some rows token by token."""
    printing.say(console, headline(found), style="bold green")
    printing.facts(console, _facts(found))
    printing.table(console, *_splits_table(found))
    printing.say(console)
    printing.table(console, *_sources_table(found))
    printing.say(console)
    printing.say(console, "training rows by length in tokens", style="bold")
    printing.bars(console, _lengths(found))
    printing.say(console)
    printing.table(console, *_batchings_table(found), texts=("micro-batch", ""))
    coloured = console.color_system is not None and not console.no_color
    marks = ("", "") if coloured else ("⟦", "⟧") if printing.knows_unicode(console) else ("[[", "]]")
    legend = "trained tokens in green" if coloured else f"trained tokens in {marks[0]} {marks[1]}"
    printing.say(console)
    printing.say(console, f"the first rows as the model sees them, {legend}", style="bold")
    for caption, sample in _captioned(found):
        printing.say(console, caption, style=_CONTEXT)
        for line in _row(sample, console, marks).split("\n"):
            printing.put(console, Text.assemble("    ", line), whole=True)


def page(found: Inspection) -> str:
    """The same as a self-contained HTML document."""
    return pages.page("A look at the data", "data.html.j2", [], **_values(found))


def html(found: Inspection) -> str:
    """The same as HTML for a notebook."""
    return pages.fragment("data.html.j2", **_values(found))


def headline(found: Inspection) -> str:
    """The summary of the training rows, in one line."""
    counts = found.train
    return (
        f"{words.count(counts.rows)} rows teach {words.count(counts.trained_tokens)} of {words.count(counts.tokens)} "
        f"tokens ({words.share(counts.supervised_share)})"
    )


def _values(found: Inspection) -> dict[str, object]:
    """The values for the template. On a phone, the table of batchings has no room for a column that one row fills."""
    head, batchings = _batchings_table(found)
    return {
        "headline": headline(found),
        "facts": list(_facts(found).items()),
        "splits": _splits_table(found),
        "sources": _sources_table(found),
        "lengths": _lengths(found),
        "batchings": (
            head[:-1],
            [(f"{name} ({mark})" if mark else name, *cells) for name, *cells, mark in batchings],
        ),
        "samples": [(caption, spelt(sample)[1]) for caption, sample in _captioned(found)],
    }


# -- facts and tables --------------------------------------------------------------------------------------------------


def _facts(found: Inspection) -> dict[str, str]:
    if found.worst_batch.packed:
        at_once = "packed"
    elif found.micro_batch_tokens:
        at_once = f"micro-batches of at most {words.count(found.micro_batch_tokens)} tokens"
    elif found.micro_batch == "auto":
        at_once = "micro-batch is auto: counted as one"
    else:
        at_once = f"micro-batch {words.count(found.micro_batch)}"
    shown = {
        "batch": f"{words.count(found.batch_size)} rows a step, {at_once}",
        "largest batch": f"{words.batch(found.worst_batch)}; the longest row is {found.longest_place}",
    }
    if found.warning:
        shown["evaluation set"] = found.warning
    elif found.eval and not found.judges:
        shown["evaluation set"] = words.TOO_FEW_TO_JUDGE
    if prompts := words.prompts(found.separator, found.train, found.eval):
        shown["prompts"] = prompts
    for name, counts in _splits(found).items():
        if counts.dropped:
            shown[f"dropped, {name}"] = words.dropped(counts)
        if counts.control_tokens:
            shown[f"control tokens, {name}"] = words.control_tokens(counts)
    if unused := words.unused(found.train, found.eval):
        shown["columns not used"] = unused
    return {**shown, "fingerprint": f"{found.fingerprint} (tokenizer and template)"}


def _splits(found: Inspection) -> dict[str, Counts]:
    return {"training": found.train} | ({"evaluation": found.eval} if found.eval else {})


def _splits_table(found: Inspection) -> printing.Cells:
    splits = _splits(found)
    numbers = {
        "rows": "rows", "tokens": "tokens", "trained tokens": "trained_tokens", "share trained": "supervised_share",
        "longest row": "longest", "truncated": "truncated", "split": "split", "duplicates": "duplicates",
        "dropped": "dropped",
    }  # fmt: skip
    rows = []
    for name, number in numbers.items():
        written = words.share if number == "supervised_share" else words.count
        rows.append((name, *(written(getattr(counts, number)) for counts in splits.values())))
    return ("", *splits), rows


def _sources_table(found: Inspection) -> printing.Cells:
    rows = [
        (source_name(source.name), words.count(source.rows), words.count(source.tokens),
         words.share(source.tokens / found.train.tokens))
        for source in found.sources
    ]  # fmt: skip
    return ("source", "rows", "tokens", "of all tokens"), rows


def _batchings_table(found: Inspection) -> printing.Cells:
    def size(batching: Batching) -> str:
        tokens = batching.changes.get("training.micro_batch_tokens")
        return f"{words.count(tokens)} tokens" if tokens else "by rows"

    rows = [
        (batching.name, words.share(batching.padding_share), words.count(batching.steps),
         words.count(batching.micro_batches), size(batching), "configured" if batching.configured else "")
        for batching in found.batchings
    ]  # fmt: skip
    return ("batching", "padding", "steps", "passes", "micro-batch", ""), rows


def _lengths(found: Inspection) -> list[tuple[str, float, str, str]]:
    """(range of lengths, fraction of the longest bar, rows, share of all rows) for each bin."""
    most = max(these.rows for these in found.lengths)
    return [
        (f"{words.count(these.first)} to {words.count(these.last)}", these.rows / most, words.count(these.rows),
         words.share(these.rows / found.train.rows))
        for these in found.lengths
    ]  # fmt: skip


# -- rows --------------------------------------------------------------------------------------------------------------


def spelt(sample: Sample) -> tuple[str, list[tuple[str, bool]]]:
    """A row for a page: its caption, and its pieces as (text, trained)."""
    return _caption(sample), [(_spelt(piece, "↵"), piece.trained) for piece in sample.pieces]


def _captioned(found: Inspection) -> Iterator[tuple[str, Sample]]:
    """The first rows with their captions, and how the first would be with the chat template if that is left out."""
    for sample in found.samples:
        yield _caption(sample), sample
    if found.as_chat:
        changes = " and ".join(f"`{key}: {inline(value)}`" for key, value in found.as_chat.changes.items())
        caption = f"{_caption(found.as_chat.sample)}, if {changes} made the rows turns of the chat template"
        yield caption, found.as_chat.sample


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


def _row(sample: Sample, console: Console, marks: tuple[str, str]) -> Text:
    """The row's text; each run of trained tokens is enclosed in the marks."""
    line_break = "↵" if printing.knows_unicode(console) else "\\n"
    text = Text()
    for trained, run in groupby(sample.pieces, key=lambda piece: piece.trained):
        tokens = "".join(_shortened([_spelt(piece, line_break) for piece in run]))
        opening, closing = marks if trained else ("", "")
        style = _TRAINED if trained else _CONTEXT
        text.append_text(printing.plain(console, f"{opening}{tokens}{closing}", style, keep="\n"))
    text.rstrip()
    return text


def _shortened(run: list[str]) -> Iterator[str]:
    """Both ends of a long run, and the number of pieces omitted between them."""
    left_out = len(run) - 2 * _SHOWN_PIECES
    if left_out <= 0:
        yield from run
        return
    yield from run[:_SHOWN_PIECES]
    yield f" ... {words.count(left_out)} more ... "
    yield from run[-_SHOWN_PIECES:]
