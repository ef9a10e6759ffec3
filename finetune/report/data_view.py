"""The data as people look at it before training: on a terminal or in a log, as a page, and in a notebook.

The first line is the answer. What cannot be seen in a row's text, such as a tab, an escape or a zero-width blank, is
spelt out: it is a token all the same, and often the fault that one is looking for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from finetune.data.inspection import Batching, Inspection, Piece, Sample
from finetune.data.prepare import Counts
from finetune.report import markup, printing, words

# Pieces of an unbroken run that a terminal shows at each of its ends; a page shows all.
_SHOWN_PIECES = 40
_TRAINED, _CONTEXT = "green", "dim"
_ROWS = "the first rows as the model sees them"


def show(found: Inspection, console: Console) -> None:
    """Print what the data teaches, its lengths, its batches, and some rows token by token."""
    printing.say(console, headline(found), style="bold green")
    printing.facts(console, _facts(found))
    printing.table(console, _split_head(found), _split_rows(found))
    printing.say(console, "")
    printing.table(console, _SOURCE_HEAD, _source_rows(found))
    printing.say(console, "")
    printing.say(console, "training rows by length in tokens", style="bold")
    printing.bars(console, _length_rows(found))
    printing.say(console, "")
    printing.table(console, _BATCHING_HEAD, _batching_rows(found), texts=("micro-batch", ""))
    coloured = console.color_system is not None and not console.no_color
    marks = ("", "") if coloured else ("⟦", "⟧") if printing.knows_unicode(console) else ("[[", "]]")
    legend = "trained tokens in green" if coloured else f"trained tokens in {marks[0]} {marks[1]}"
    printing.say(console, "")
    printing.say(console, f"{_ROWS}, {legend}", style="bold")
    for sample in found.samples:
        printing.say(console, _caption(sample), style=_CONTEXT)
        for line in _row(sample, console, marks).split("\n"):
            console.print(Text.assemble("    ", line), soft_wrap=not console.is_terminal, highlight=False)


def page(found: Inspection) -> str:
    """A whole page that needs nothing but itself."""
    return markup.document("A look at the data", html(found))


def html(found: Inspection) -> str:
    """The markup of the page, which a notebook shows too."""
    return "".join(
        [
            f"<p><strong>{markup.escape(headline(found))}</strong></p>",
            markup.table((), list(_facts(found).items())),
            markup.section(
                "Rows and tokens",
                markup.table(_split_head(found), _split_rows(found), numbers=True)
                + markup.table(_SOURCE_HEAD, _source_rows(found), numbers=True),
            ),
            markup.section("Training rows by length in tokens", _histogram(found)),
            markup.section("Batches of an epoch", markup.table(_BATCHING_HEAD, _batching_rows(found), numbers=True)),
            markup.section(
                f"{_ROWS.capitalize()}, <mark>trained tokens</mark> marked",
                "".join(f"<h3>{markup.escape(_caption(sample))}</h3>{_tokens(sample)}" for sample in found.samples),
            ),
        ]
    )


# -- what there is to say ----------------------------------------------------------------------------------------------

_SOURCE_HEAD = ("source", "rows", "tokens", "of all tokens")
_BATCHING_HEAD = ("batching", "padding", "steps", "passes", "micro-batch", "")


def headline(found: Inspection) -> str:
    """What the training rows teach, in a line."""
    counts = found.train
    return (
        f"{words.count(counts.rows)} rows teach {words.count(counts.trained_tokens)} of {words.count(counts.tokens)} "
        f"tokens ({words.share(counts.supervised_share)})"
    )


def _facts(found: Inspection) -> dict[str, str]:
    if found.worst_batch.packed:
        at_once = "packed"
    elif found.micro_batch_tokens:
        at_once = f"micro-batches of at most {words.count(found.micro_batch_tokens)} tokens"
    elif found.micro_batch == "auto":
        at_once = "micro-batch is auto: counted as one"
    else:
        at_once = f"micro-batch {words.count(found.micro_batch)}"
    told = {
        "batch": f"{words.count(found.batch_size)} rows a step, {at_once}",
        "largest batch": f"{words.batch(found.worst_batch)}; the longest row is {found.longest_place}",
    }
    if found.warning:
        told["held out"] = found.warning
    for name, counts in _splits(found).items():
        if counts.dropped:
            told[f"dropped, {name}"] = words.dropped(counts)
        if counts.control_tokens:
            told[f"control tokens, {name}"] = words.control_tokens(counts)
    if unused := words.unused(found.train, found.eval):
        told["columns not used"] = unused
    return {**told, "fingerprint": f"{found.fingerprint} (tokenizer and template)"}


def _splits(found: Inspection) -> dict[str, Counts]:
    return {"training": found.train} | ({"held out": found.eval} if found.eval else {})


def _split_head(found: Inspection) -> tuple[str, ...]:
    return ("", *_splits(found))


def _split_rows(found: Inspection) -> list[tuple[str, ...]]:
    splits = _splits(found).values()
    return [
        ("rows", *(words.count(counts.rows) for counts in splits)),
        ("tokens", *(words.count(counts.tokens) for counts in splits)),
        ("trained tokens", *(words.count(counts.trained_tokens) for counts in splits)),
        ("share trained", *(words.share(counts.supervised_share) for counts in splits)),
        ("longest row", *(words.count(counts.longest) for counts in splits)),
        ("truncated", *(words.count(counts.truncated) for counts in splits)),
        ("split", *(words.count(counts.split) for counts in splits)),
        ("duplicates", *(words.count(counts.duplicates) for counts in splits)),
        ("dropped", *(words.count(counts.dropped) for counts in splits)),
    ]


def _source_rows(found: Inspection) -> list[tuple[str, ...]]:
    return [
        (source.name, words.count(source.rows), words.count(source.tokens),
         words.share(source.tokens / found.train.tokens))
        for source in found.sources
    ]  # fmt: skip


def _batching_rows(found: Inspection) -> list[tuple[str, ...]]:
    return [
        (
            batching.name,
            words.share(batching.padding_share),
            words.count(batching.steps),
            words.count(batching.micro_batches),
            _size(batching),
            "configured" if batching.configured else "",
        )
        for batching in found.batchings
    ]


def _size(batching: Batching) -> str:
    tokens = batching.changes.get("training.micro_batch_tokens")
    return f"{words.count(tokens)} tokens" if tokens else "by rows"


def _length_rows(found: Inspection) -> list[tuple[str, float, str, str]]:
    """(lengths, part of the longest bar, rows, share of all rows) of each bin."""
    longest = max(these.rows for these in found.lengths)
    return [
        (
            f"{words.count(these.first)} to {words.count(these.last)}",
            these.rows / longest,
            words.count(these.rows),
            words.share(these.rows / found.train.rows),
        )
        for these in found.lengths
    ]


def _caption(sample: Sample) -> str:
    return f"{sample.place}: {words.count(sample.tokens)} tokens, {words.count(sample.trained_tokens)} trained"


def _visible(piece: Piece, line_break: str) -> str:
    """The piece's text with all that cannot be seen spelt out; `line_break` stands before a line's end."""
    return "".join(
        f"{line_break}\n" if letter == "\n"
        else letter if letter.isprintable()
        else letter.encode("unicode_escape").decode("ascii")
        for letter in piece.text
    )  # fmt: skip


# -- a row on a terminal -----------------------------------------------------------------------------------------------


def _row(sample: Sample, console: Console, marks: tuple[str, str]) -> Text:
    """The row's text; each unbroken run of trained tokens stands between the marks."""
    line_break = "↵" if printing.knows_unicode(console) else "\\n"
    text = Text()
    for trained, run in groupby(sample.pieces, key=lambda piece: piece.trained):
        told = "".join(_shortened([_visible(piece, line_break) for piece in run]))
        opening, closing = marks if trained else ("", "")
        text.append(printing.encodable(console, f"{opening}{told}{closing}"), style=_TRAINED if trained else _CONTEXT)
    text.rstrip()
    return text


def _shortened(run: list[str]) -> Iterator[str]:
    """Both ends of a run; its middle is what one can do without."""
    left_out = len(run) - 2 * _SHOWN_PIECES
    if left_out <= 0:
        yield from run
        return
    yield from run[:_SHOWN_PIECES]
    yield f" ... {words.count(left_out)} more ... "
    yield from run[-_SHOWN_PIECES:]


# -- as markup ---------------------------------------------------------------------------------------------------------


def _histogram(found: Inspection) -> str:
    # The bars carry their style, because a notebook has not the page's.
    lines = "".join(
        f'<tr><th scope="row">{name}</th><td style="width: 16rem">'
        f'<div style="width: {part:.1%}; height: 1rem; background: var(--bar, #0072b2)"></div></td>'
        f"<td>{rows}</td><td>{share}</td></tr>"
        for name, part, rows, share in _length_rows(found)
    )
    return f'<div class="wide"><table class="numbers"><tbody>{lines}</tbody></table></div>'


def _tokens(sample: Sample) -> str:
    """Each token in an element of its own, the trained ones marked."""
    return (
        '<pre class="tokens">'
        + "".join(
            f"<{tag}>{markup.escape(_visible(piece, '↵'))}</{tag}>"
            for piece in sample.pieces
            for tag in ("mark" if piece.trained else "span",)
        )
        + "</pre>"
    )
