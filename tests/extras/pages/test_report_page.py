"""The report is one file, says what the run says, and runs nothing of it; test_browser.py looks at it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from jobs import BF16, write_rows
from markup_reader import Reader
from report_lines import MIB, evaluation_line, training_line, write_lines

from finetune.config import Config, TrainingSection, dump
from finetune.export.export_formats import FORMATS
from finetune.extras.pages import report as page
from finetune.report import words as report_words
from finetune.report.figures import Figures
from finetune.report.result import Result
from finetune.storage.files import write_json, write_text
from finetune.storage.files import write_lines as write_lines_to
from finetune.storage.rundir import RunDirectory

_IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


@pytest.fixture
def markup(run: RunDirectory) -> str:
    page.write(run)
    return run.report_file.read_text(encoding="utf-8")


def curves_of(markup: str) -> dict[str, dict]:
    """The charts of a page by title."""
    [drawn] = re.findall(r'<script type="application/json" id="curves">(.*?)</script>', markup)
    return {chart["title"]: chart for chart in json.loads(drawn)}


def test_nothing_is_loaded_from_elsewhere_and_links_lead_to_the_runs_own_files(run: RunDirectory, markup: str) -> None:
    reader = Reader(markup)
    assert {"adapter/", "config.yaml", "metrics.jsonl", "events.jsonl"} <= set(reader.references)
    assert all((run.path / link).exists() for link in reader.references)
    assert not reader.tags & {"link", "iframe", "object", "form", "img"}
    assert not re.search(r"url\(|@import", markup)


def test_all_that_other_commands_write_is_linked(run: RunDirectory) -> None:
    written = {form.folder for form in FORMATS.values()}
    written |= {run.eval_answers_file.name}
    for name in written:
        (run.path / name).touch()
    page.write(run)
    linked = {link.rstrip("/") for link in Reader(run.report_file.read_text()).references}
    assert written <= linked, "describe the missing one in _FILES of extras/pages/report.py"


def test_the_page_shows_questions_references_and_answers(markup: str) -> None:
    for text in ("What is &lt;b&gt;x&lt;/b&gt;?", "A name.", "&lt;script&gt;alert(1)&lt;/script&gt;"):
        assert text in markup


def test_the_policy_of_the_page_allows_its_own_script_and_nothing_else(markup: str) -> None:
    [script] = re.findall(r"<script>(.*?)</script>", markup, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', markup)
    assert policy.replace("&#39;", "'").startswith("default-src 'none';")
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert markup.count("<script") == 2


def test_curves_are_the_numbers_of_the_lines(markup: str) -> None:
    charts = curves_of(markup)
    training, evaluation = charts["Loss"]["tables"]
    assert training["steps"] == [1, 2, 3]
    assert [one["values"] for one in training["series"]] == [[3.5, 2.5, 2.0], [2.6667] * 3]
    assert (evaluation["steps"], evaluation["series"][0]["values"]) == ([0, 2, 3], [4.0, 3.0, 3.5])
    assert charts["Tokens per second"]["tables"][0]["series"][0]["values"] == [1000, 2000, 3000]
    memory, _ = charts["Peak memory by phase"]["tables"]
    assert {one["name"]: one["values"][1] for one in memory["series"]} == {
        "forward": 0.79102, "backward": 0.92773, "optimizer": 0.82031,
    }  # fmt: skip
    assert charts["Peak memory by phase"]["unit"] == "resident, GiB"  # as loading took 2 GiB
    assert set(charts) == {"Loss", "Learning rate", "Gradient norm", "Tokens per second", "Peak memory by phase"}


def test_a_long_run_makes_a_small_page_that_hides_no_spike(empty_run: RunDirectory) -> None:
    lines = [training_line(step, 2.0, forward=800, backward=900, optimizer=850) for step in range(1, 20_001)]
    lines[12_345]["loss"] = 9.5
    lines[12_345]["memory"]["backward"]["resident_bytes"] = 2**31
    lines[3]["loss"] = None
    lines += [evaluation_line(step, 3.0) for step in range(0, 20_000, 10)]
    write_rows(empty_run.metrics_file, lines)
    events = [{"time": step, "event": "saved", "step": step, "memory": {}} for step in range(2000)]
    write_lines_to(empty_run.events_file, events)
    page.write(empty_run)
    markup = empty_run.report_file.read_text(encoding="utf-8")
    assert len(markup) < 250_000
    assert "1,800 more in events.jsonl" in markup
    charts = curves_of(markup)
    highest, lowest, mean = charts["Loss"]["tables"][0]["series"]
    assert [one["name"] for one in (highest, lowest, mean)] == ["highest", "lowest", "mean of 1,025 steps"]
    assert (max(highest["values"]), min(lowest["values"])) == (9.5, 2.0)
    backward = charts["Peak memory by phase"]["tables"][0]["series"][1]
    assert max(backward["values"]) == 2


@pytest.mark.parametrize("key", ["question", "reference", "before", "after"])
def test_markup_anywhere_in_an_answer_is_harmless(run: RunDirectory, key: str) -> None:
    row = dict.fromkeys(("question", "reference", "before", "after"), "plain")
    write_json(run.answers_file, [{**row, key: '"><img src=//example.org/x>'}])
    page.write(run)
    reader = Reader(run.report_file.read_text(encoding="utf-8"))
    assert not any("example" in link for link in reader.references)
    assert "img" not in reader.tags


def test_markup_in_names_and_events_is_harmless(tmp_path) -> None:
    run = RunDirectory(tmp_path / "<script>run")
    run.path.mkdir()
    run.config_file.write_text("model: <script>", encoding="utf-8")
    run.event("<script>", **{"<script>": "<script>"})
    write_json(run.environment_file, {"device": {"type": "cpu"}, "<script>": "<script>"})
    page.write(run)
    markup = run.report_file.read_text(encoding="utf-8")
    assert "script" not in Reader(markup).tags
    assert "config.yaml cannot be read: " in markup


def test_the_page_shows_job_results_forecast_and_events(run: RunDirectory) -> None:
    words = words_of(run)
    assert "2.00 GiB no forecast was made" in words
    assert "phase resident load 2.00 GiB forward 810 MiB backward 950 MiB" in words
    sizes = {"phase": "backward", "measure": "allocated_bytes", "forecast_bytes": 900 * MIB,
             "measured_bytes": 1000 * MIB}  # fmt: skip
    forecast = {"device": "cpu", "needed_bytes": 1843 * MIB, "budget_bytes": 2**32, "differences": [sizes]}
    write_json(run.forecast_file, forecast)
    split = {"rows": 1000, "tokens": 4000, "trained_tokens": 1000, "longest": 60}
    row = {"place": "rows.jsonl:7", "tokens": 600, "trained_tokens": 2, "pieces": [{"text": "<p>\n", "trained": True}]}
    write_json(run.facts_file, {"train": split, "eval": {**split, "rows": 20}, "samples": [row]})
    words = words_of(run)
    for text in (
        "LoRA of rank 16", "builtin:python_docs, 1,000 rows, 4,000 tokens, 25.0% of them trained, 20 rows held out",
        "4.0000 → 3.0000 -25.0% at step 2, which was published", "3.5000 → 2.0000",
        "2.00 GiB forecast 1.80 GiB, of its tensors 900 MiB (-10.0%), budget 4.00 GiB",
        "backward 900 MiB 1000 MiB -10.0% *",
        "with libraries the process was to take 1.80 GiB and took up to 2.00 GiB",
        "2,000 tokens/s median, 14.3% padding", "of CPU time", "cpu, 2 cores, 2 threads",
        "best loaded", "cpu cores 2", "rows.jsonl:7: 600 tokens, 2 trained",
    ):  # fmt: skip
        assert text in words
    assert "<mark>&lt;p&gt;↵\n</mark>" in run.report_file.read_text(encoding="utf-8")


def test_only_settings_other_than_the_defaults_are_shown(empty_run: RunDirectory) -> None:
    write_text(empty_run.config_file, dump(Config.model_validate({"adapter": {"rank": 7}})))
    page.write(empty_run)
    [settings] = re.findall("<pre>(.*?)</pre>", empty_run.report_file.read_text(encoding="utf-8"), re.S)
    assert settings == "adapter:\n  rank: 7\noutput:\n  dir: runs/config\n"


def test_duration_and_cost_are_those_of_all_starts_and_ranks_without_a_later_merge(empty_run: RunDirectory) -> None:
    times = [(0, "started", 1), (60, "saved", None), (1000, "resumed", 4), (1030, "finished", None),
             (9000, "merged", None)]  # fmt: skip
    events = [{"time": time, "event": event, "step": 1, **({"world_size": n} if n else {})} for time, event, n in times]
    write_lines_to(empty_run.events_file, events)
    figures = Figures.read(empty_run)
    assert (figures.seconds, figures.device_hours, figures.processes) == (90, (60 + 30 * 4) / 3600, 4)


def test_the_proofs_of_a_merged_model_and_of_an_export_are_shown_bytes_first(run: RunDirectory) -> None:
    for folder in (run.merged, run.path / "plain-adapter"):
        folder.mkdir()
    merged = {"rows": 8, "tokens": 1234, "error": 0.0025, "bound": 0.011, "effect": 0.31, "agreement": 0.9951}
    proof = {
        "weights": {"count": 1234, "differing": 0}, "served": {"kl": 2e-9, "kl_max": 3e-8, "agreement": 1.0},
        "losses": {"base": 4.0, "trained": 3.0, "served": 3.01}, "gain_kept": 0.99, "gain_unknown": None,
    }  # fmt: skip
    write_json(run.merged / "merge.json", merged)
    write_json(run.path / "plain-adapter" / "export.json", proof)
    page.write(run)
    markup = run.report_file.read_text(encoding="utf-8")
    assert all(text in markup for text in ("0.250%", "1.100%", "31.000%", "99.51%", "8 rows, 1,234 tokens"))
    said = report_words.served(proof)
    assert said is not None
    assert said in markup
    places = [said.index(part) for part in ("0 of 1,234 weights", "KL", "token in 100.0%", "99.0% of the gain")]
    assert places == sorted(places)


def test_a_loss_that_was_not_finite_is_shown_as_nan(empty_run: RunDirectory) -> None:
    write_lines(empty_run, evaluation_line(0, None), training_line(1, None), evaluation_line(1, None))
    page.write(empty_run)
    markup = empty_run.report_file.read_text(encoding="utf-8")
    Reader(markup)
    assert "nan → nan" in markup
    assert "NaN" not in re.findall(r'id="curves">(.*?)</script>', markup)[0]
    assert "0.0000" not in markup


def test_a_notebook_shows_results_and_plot(run: RunDirectory) -> None:
    run.plot_file.write_bytes(_IMAGE)
    reader = Reader(Result(run)._repr_html_())
    assert {"table", "img"} <= reader.tags


def words_of(run: RunDirectory) -> str:
    page.write(run)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", run.report_file.read_text(encoding="utf-8")))


def test_the_forecast_of_a_start_without_steps_is_not_compared_with_earlier_peaks(run: RunDirectory) -> None:
    """The run has done three steps; a later start asked for two of them."""
    write_text(run.config_file, dump(Config.model_validate({"training": {"max_steps": 2}})))
    run.event("resumed", step=3)
    run.event("trained", step=3, memory={"load": {"resident_bytes": 100 * MIB}})
    sizes = {"phase": "load", "measure": "resident_bytes", "forecast_bytes": 90 * MIB, "measured_bytes": 100 * MIB}
    forecast = {"device": "cpu", "needed_bytes": 900 * MIB, "budget_bytes": 2**32, "differences": [sizes]}
    write_json(run.forecast_file, forecast)
    words = words_of(run)
    assert "2.00 GiB over 2 starts; the last one took no step; its forecast was 900 MiB" in words
    assert "2 steps, supervised" in words
    assert "an earlier start had done 3 by then" in words


def test_a_changed_schedule_is_shown_with_both_learning_rates(run: RunDirectory) -> None:
    run.event("schedule_changed", step=3, steps=[3, 600], learning_rate=[6.1e-05, 2.2e-03])
    assert (
        "schedule of 3 steps until step 3, then of 600: the learning rate went from 6.10e-05 to 2.20e-03"
        in words_of(run)
    )
    run.event("changed", config={"training.max_steps": [3, 600], "adapter.dropout": [0.1, None]})
    assert "config training.max_steps 3 → 600, adapter.dropout 0.1 → None" in words_of(run)
    assert "steps 3 → 600, learning rate 6.1e-05 → 0.0022" in words_of(run)


def test_seconds_and_hours_have_their_unit(run: RunDirectory) -> None:
    run.event("saved", step=3, seconds=0.09, held_seconds=0.0134, memory={"resident_bytes": MIB})
    words = words_of(run)
    assert "0.09 s, training waited 0.013 s" in words
    run.event("saved", step=6, seconds=1234.5, held_seconds=61.2, memory={"resident_bytes": MIB})
    assert "1,234 s, training waited 61 s" in words_of(run)
    assert "held_seconds" not in words
    assert [report_words.hours(hours) for hours in (0.00771, 0.5, 12.5, 999.7, 4321)] == [
        "27.8 seconds", "30 minutes", "12.5 hours", "1,000 hours", "4,321 hours"
    ]  # fmt: skip


def test_large_numbers_are_written_out() -> None:
    # A loss that diverges, and operations a second, have too many digits to be read.
    assert [report_words.significant(value) for value in (999_999_999_999.0, 1.5e14, 3e30, float("inf"))] == [
        "999,999,999,999", "1.5e+14", "3e+30", "inf"
    ]  # fmt: skip
    for section, said in [
        (TrainingSection(max_steps=1_000_000), "1,000,000 steps, "), (TrainingSection(max_steps=1), "1 step, "),
        (TrainingSection(epochs=2.5), "2.5 epochs, "),
    ]:  # fmt: skip
        assert report_words.training(section, "adamw_8bit").startswith(said)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("model.name=a", "a in nf4, constants quantized too; bf16"), ("quantization.kind=q4_0", "in q4_0; bf16"),
        ("quantization.kind=published", ", as published; bf16"), ("model.name=a.gguf", "a.gguf, as published; bf16"),
    ],
)  # fmt: skip
def test_a_base_is_named_with_the_form_that_it_is_held_in(base: str, said: str) -> None:
    key, _, value = base.partition("=")
    config = BF16.changed({key: value})
    assert said in report_words.base(config.model, config.quantization, config.training.precision)
