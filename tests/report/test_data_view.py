"""What is said of a job's data on a terminal, in a log, on a page and in a notebook."""

from __future__ import annotations

import dataclasses
import html
import io
import re
from pathlib import Path
from typing import Any

from jobs import write_rows
from markup_reader import Reader
from rich.console import Console

import finetune
from finetune.data.batching import LargestBatch
from finetune.data.counts import CONTROL_TOKENS, EMPTY, TOO_LONG, UNTRAINED, Affected, Counts, Traits
from finetune.data.inspection import AsChat, Batches, Batching, Bin, Inspection, PlainText, SourceCounts, TrainingRows
from finetune.report.data_view import DataView
from finetune.storage.records import Sample, TokenText

# What could move a cursor, recolour a screen, or hide in a text.
UNSEEN = "\x1b[31m\x07\x9b\t\u202e\u200b\r\ud800"
SPELT_OUT = r"\x1b[31m\x07\x9b\t\u202e\u200b\r\ud800"


def sample(*pieces: tuple[str, bool], place: str = "rows.jsonl:1") -> Sample:
    trained = sum(trained for _, trained in pieces)
    return Sample(place, len(pieces), trained, tuple(TokenText(text, trained) for text, trained in pieces))


AFFECTED = [Affected(f"rows.jsonl:{line}", "truncated", TOO_LONG, 2000) for line in range(7)]


def inspection(**changes: Any) -> Inspection:
    """1,000 rows of two files, grouped by length, and one of them as the model sees it."""
    batchings = (
        Batching("grouped by length", {"training.group_by_length": True}, True, 0.0125, 63, 126),
        Batching("shuffled", {"training.group_by_length": False}, False, 0.4, 63, 126),
    )
    sources = SourceCounts("rows.jsonl", 600, 150_000), SourceCounts("more.csv", 400, 50_000)
    found = Inspection(
        fingerprint="0123456789abcdef" * 4,
        train=Counts(rows=1000, tokens=200_000, trained_tokens=50_000, longest=300, affected=AFFECTED),
        eval=Counts(rows=20, tokens=4000, trained_tokens=2000, longest=250),
        rows=TrainingRows("rows.jsonl:17", sources, (Bin(129, 192, 400), Bin(193, 256, 0), Bin(257, 384, 600))),
        batches=Batches(16, 8, None, batchings, LargestBatch(8, 300, True, 900, "the data's rows")),
        samples=(sample(("<s>", False), ("Hi", False), ("\n", False), (" one", True), ("</s>", True)),),
    )
    return dataclasses.replace(found, **changes)


def shown(found: Inspection, *, encoding: str = "utf-8", colours: bool = False) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=file, width=100, force_terminal=colours, color_system="standard" if colours else None, no_color=False
    )
    DataView(found).show(console)
    file.seek(0)
    return file.read()


def cells(text: str, name: str) -> list[str]:
    """The cells of the only line that begins with `name`, without rules."""
    (line,) = [line for line in text.splitlines() if re.match(rf"[│|\s]*{re.escape(name)}\s*(\s\s|│)", line)]
    return [cell for cell in re.split(r"\s{2,}|\s*│\s*", line.strip("│ ")) if cell]


# -- on a terminal and in a log ----------------------------------------------------------------------------------------


def test_unused_columns_and_control_tokens_have_a_line_each() -> None:
    assert "not used" not in shown(inspection())
    spelt = [Affected("rows.jsonl:7", "kept", CONTROL_TOKENS, 20)]
    many = [f"column{number}" for number in range(30)]
    found = inspection(
        train=Counts(
            rows=1000, tokens=2, trained_tokens=1, affected=spelt, traits=Traits(unused=["id", "lang\x1b[31m"])
        ),
        eval=Counts(rows=20, tokens=2, traits=Traits(unused=["id", *many])),
        warning="none: all rows are equal",
    )
    lines = shown(found).splitlines()
    [unused] = [line for line in lines if line.startswith("columns not used")]
    assert "id, lang\N{REPLACEMENT CHARACTER}[31m, column0, " in unused
    assert unused.endswith("and 20 more")
    [control] = [line for line in lines if line.startswith("control tokens, training")]
    assert all(word in control for word in ("1 row ", "rows.jsonl:7", "ordinary text", "data.control_tokens: parse"))
    assert any(line.startswith("evaluation set ") and line.endswith("none: all rows are equal") for line in lines)
    page = DataView(found).page()
    assert "rows.jsonl:7" in page
    assert "column0" in page


def test_training_and_evaluation_rows_are_two_columns_or_one_without_an_evaluation_set() -> None:
    text = shown(inspection())
    assert cells(text, "rows") == ["rows", "1,000", "20"]
    assert cells(text, "share trained") == ["share trained", "25.0%", "50.0%"]
    assert cells(text, "truncated") == ["truncated", "7", "0"]
    alone = shown(inspection(eval=None))
    assert cells(alone, "longest row") == ["longest row", "300"]
    assert "evaluation" not in alone


def test_sources_lengths_and_batchings_are_counted_and_the_configured_one_is_marked() -> None:
    text = shown(inspection())
    assert cells(text, "more.csv") == ["more.csv", "400", "50,000", "25.0%"]
    assert cells(text, "129 to 192") == ["129 to 192", "█" * 21 + "▍", "400", "40.0%"]
    assert cells(text, "193 to 256") == ["193 to 256", "0", "0.0%"]
    assert cells(text, "257 to 384") == ["257 to 384", "█" * 32, "600", "60.0%"]
    grouped = ["grouped by length", "1.2%", "63", "126", "by rows", "configured"]
    assert cells(text, "grouped by length") == grouped
    assert cells(text, "shuffled") == ["shuffled", "40.0%", "63", "126", "by rows"]


def test_batch_largest_batch_longest_row_and_fingerprint_are_shown() -> None:
    lines = shown(inspection()).splitlines()
    assert "batch          16 rows a step, micro-batch 8" in lines
    assert "largest batch  8 rows x 300 tokens, padded; the longest row is rows.jsonl:17" in lines
    assert f"fingerprint    {'0123456789abcdef' * 4} (tokenizer and template)" in lines
    batches = inspection().batches
    auto, by_tokens = (
        dataclasses.replace(batches, **changed) for changed in ({"micro_batch": "auto"}, {"micro_batch_tokens": 4096})
    )
    assert "micro-batch is auto: counted as one" in shown(inspection(batches=auto))
    assert "16 rows a step, micro-batches of at most 4,096 tokens" in shown(inspection(batches=by_tokens))


def test_the_answer_comes_first_and_dropped_rows_are_shown_with_their_locations_if_there_are_any() -> None:
    rows = [Affected(f"rows.jsonl:{line}", "dropped", EMPTY if line < 3 else UNTRAINED) for line in range(1, 6)]
    text = shown(inspection(train=Counts(rows=1, tokens=10, trained_tokens=5, longest=10, affected=rows)))
    assert cells(text, "dropped") == ["dropped", "5", "0"]
    assert "2 empty answer, 3 nothing to train (rows.jsonl:1, rows.jsonl:2, rows.jsonl:3, ...)" in text
    plain = shown(inspection())
    assert plain.splitlines()[0] == "1,000 rows teach 50,000 of 200,000 tokens (25.0%)"
    assert "dropped, training" not in plain


def test_trained_tokens_are_green_or_in_brackets_and_all_that_has_no_glyph_is_escaped() -> None:
    text = shown(inspection())
    assert "    <s>Hi↵\n    ⟦ one</s>⟧\n" in text
    assert "trained tokens in ⟦ ⟧" in text
    assert "\x1b" not in text
    text = shown(inspection(), colours=True)
    assert "\x1b[32m one</s>\x1b[0m" in text
    assert "\x1b[2m<s>Hi↵\x1b[0m" in text
    assert "⟦" not in text
    text = shown(inspection(samples=(sample(("é\n", False), ("日", True)),)), encoding="ascii")
    assert "    ?\\n\n    [[?]]" in text
    for trained in (True, False):
        assert SPELT_OUT in shown(inspection(samples=(sample((UNSEEN, trained), place=UNSEEN),)))


def test_the_middle_of_a_long_row_is_replaced_by_its_length() -> None:
    long = [(f"<{number}>", False) for number in range(1000)]
    text = shown(inspection(samples=(sample(*long, ("answer", True), ("</s>", True)),)))
    assert "<39> ... 920 more ... <960>" in text
    assert "<999>⟦answer</s>⟧" in text


# -- as a page and in a notebook ---------------------------------------------------------------------------------------


def test_a_row_of_plain_text_is_shown_through_the_chat_template_as_well() -> None:
    columns = {"data.columns": {"instruction": "<b>\x1b", "output": "a, b"}, "data.format": "auto"}
    as_chat = AsChat(columns, sample(("<|user|>", False), ("so", True), place="rows.jsonl:9"))
    found = inspection(plain_text=PlainText(as_chat=as_chat))
    said = (
        """rows.jsonl:9: 2 tokens, 1 trained, if `data.columns: {instruction: "<b>\\e", output: 'a, b'}` and """
        "`data.format: auto` made the rows turns of the chat template"
    )
    assert said in " ".join(shown(found).split())
    page = DataView(found).page()
    assert html.escape(said, quote=False) in html.unescape(page).replace("<b>", "&lt;b&gt;")
    assert "<b>" not in page


def test_a_small_evaluation_set_and_prompts_without_a_template_are_pointed_out() -> None:
    traits = Traits(kinds={"completion": 2}, run_together=1)
    text = shown(inspection(judges=False, train=Counts(rows=2, tokens=9, traits=traits)))
    assert re.search(
        r"^evaluation set +too few different rows to choose an adapter by, so the last one is ", text, re.M
    )
    assert re.search(r"^prompts +plain text in 2 rows, .*; no white space before the answer in 1 \(see", text, re.M)


def test_each_token_has_an_element_the_trained_ones_are_marked_and_a_notebook_shows_the_body() -> None:
    look = DataView(inspection())
    page = look.page()
    assert "<span>&lt;s&gt;</span><span>Hi</span><span>↵\n</span><mark> one</mark><mark>&lt;/s&gt;</mark>" in page
    assert look._repr_html_() in page
    assert not Reader(look._repr_html_()).tags & {"html", "style", "body"}
    assert repr(look) == "<data: 1,000 rows teach 50,000 of 200,000 tokens (25.0%)>"


def test_pairs_show_their_prompt_once_and_both_answers_side_by_side(quick: Any, tmp_path: Path) -> None:
    answers = {"chosen": "Because of it.", "rejected": "No idea."}
    rows = [{"instruction": f"Why {n}?", **answers} for n in range(8)]
    write_rows(tmp_path / "pairs.jsonl", rows)
    job = quick(f"data.train={tmp_path / 'pairs.jsonl'}", "training.objective=dpo", "data.eval=none")
    view = finetune.inspect_data(job)

    def lines(width: int) -> list[str]:
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        view.show(console)
        return console.file.getvalue().splitlines()  # type: ignore[attr-defined]

    wide, narrow = lines(140), lines(90)
    assert [sum("Why 0?" in line for line in each) for each in (wide, narrow)] == [1, 1]
    assert any("Because of it." in line and "No idea." in line for line in wide)
    assert not any("Because of it." in line and "No idea." in line for line in narrow)
    assert any("⟦Because of it." in line for line in narrow)
    prompt, both, *_ = view.values()["samples"]
    assert [len(prompt), len(both)] == [1, 2]
    assert not any(trained for _, trained in prompt[0][1])
    assert all(trained for _, pieces, *_ in both for text, trained in pieces if text.strip("↵\n"))
    assert "grid-template-columns" in view.page()
