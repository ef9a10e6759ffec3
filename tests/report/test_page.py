"""The report is one file, says what the run says, and runs nothing of it."""

from __future__ import annotations

import base64
import re

import pytest
from markup_reader import Reader
from report_lines import evaluation_line, training_line, write_lines

from finetune.report import page
from finetune.report.result import Result
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory

# The page embeds what is there; that plots are images is test_plots' fact.
_IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


@pytest.fixture
def markup(run: RunDirectory) -> str:
    run.plot_file.write_bytes(_IMAGE)
    page.write(run)
    return run.report_file.read_text(encoding="utf-8")


def test_nothing_is_loaded_from_elsewhere(markup: str) -> None:
    reader = Reader(markup)
    assert len(reader.references) == 1
    assert reader.references[0].startswith("data:image/png;base64,")
    assert not reader.tags & {"script", "link", "iframe", "object", "form"}
    assert not re.search(r"url\(|@import|https?://", markup)


def test_the_plot_is_embedded_whole(run: RunDirectory, markup: str) -> None:
    encoded = Reader(markup).references[0].removeprefix("data:image/png;base64,")
    assert base64.b64decode(encoded) == _IMAGE


def test_answers_are_shown_as_text(markup: str) -> None:
    assert "<script" not in markup
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in markup
    assert "What is &lt;b&gt;x&lt;/b&gt;?" in markup


@pytest.mark.parametrize("key", ["question", "reference", "before", "after"])
def test_markup_anywhere_in_an_answer_is_harmless(run: RunDirectory, key: str) -> None:
    row = dict.fromkeys(("question", "reference", "before", "after"), "plain")
    write_json(run.answers_file, [{**row, key: '"><img src=//example.org/x>'}])
    page.write(run)
    assert Reader(run.report_file.read_text(encoding="utf-8")).references == []


def test_markup_in_names_and_events_is_harmless(tmp_path) -> None:
    run = RunDirectory(tmp_path / "<script>run")
    run.path.mkdir()
    run.config_file.write_text("model: <script>", encoding="utf-8")
    run.event("<script>", **{"<script>": "<script>"})
    write_json(run.environment_file, {"device": {"type": "cpu"}, "<script>": "<script>"})
    page.write(run)
    assert "script" not in Reader(run.report_file.read_text(encoding="utf-8")).tags


@pytest.mark.parametrize(
    "text", ["3.0000", "-25.0%", "2.00 GiB", "950 MiB", "save 600 MiB", "best loaded", "rank: 16", "cpu cores 2"]
)
def test_what_the_run_says_is_told(markup: str, text: str) -> None:
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup))
    assert text in words


def test_the_proof_of_a_merged_model_is_shown(run: RunDirectory) -> None:
    run.merged.mkdir()
    proof = {"rows": 8, "tokens": 1234, "error": 0.0025, "bound": 0.011, "effect": 0.31, "agreement": 0.9951}
    write_json(run.merged / "merge.json", proof)
    page.write(run)
    markup = run.report_file.read_text(encoding="utf-8")
    assert all(text in markup for text in ("0.250%", "1.100%", "31.000%", "99.51%", "8 rows, 1,234 tokens"))


def test_a_loss_that_was_not_finite_is_shown_as_nan(empty_run: RunDirectory) -> None:
    write_lines(empty_run, evaluation_line(0, None), training_line(1, None), evaluation_line(1, None))
    page.write(empty_run)
    markup = empty_run.report_file.read_text(encoding="utf-8")
    assert markup.count("<td>nan</td>") == 3
    assert "0.0000" not in markup


def test_a_run_without_lines_has_a_report(empty_run: RunDirectory) -> None:
    page.write(empty_run)
    Reader(empty_run.report_file.read_text(encoding="utf-8"))


def test_a_notebook_shows_results_and_plot(run: RunDirectory) -> None:
    run.plot_file.write_bytes(_IMAGE)
    reader = Reader(Result(run)._repr_html_())
    assert {"table", "img"} <= reader.tags
