"""The rules of the report, once over all views: what each may print, write and load, whatever is in it."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forecasts import forecast
from markup_reader import Reader
from rich.console import Console
from test_data_view import inspection, sample

import finetune
from finetune.config import Config, dump
from finetune.data.inspection import SourceCounts
from finetune.extras.doctor.findings import Examination, Finding
from finetune.extras.sweeps.table import SettingResult, SweepTable
from finetune.extras.sweeps.view import SweepView
from finetune.forecast.answer_memory import Serving
from finetune.forecast.levers import Lever
from finetune.forecast.plan import Fitted, Limits, Plan
from finetune.report.data_view import DataView
from finetune.report.forecast_view import ChosenView, FittedView, PlanView, ServingView
from finetune.report.result import Result
from finetune.report.scores import Scores
from finetune.report.view import PageView, View
from finetune.report.visible import visible
from finetune.storage.files import write_text
from finetune.storage.rundir import RunDirectory

# Moves a cursor, recolours a screen, reorders a line, is markup of rich, of HTML and of nothing.
HOSTILE = '\x1b[2J\x07\x9b\u202e[bold]é日\u200b"><img src=//example.org/x><script>alert(1)</script></pre>'


def data(_: RunDirectory) -> View:
    hostile = sample((HOSTILE, True), (HOSTILE, False), place=HOSTILE)
    sources = (SourceCounts(HOSTILE, 600, 150_000), SourceCounts("more.csv", 400, 50_000))
    found = inspection(samples=(hostile,))
    rows = dataclasses.replace(found.rows, sources=sources, longest_place=HOSTILE)
    return DataView(dataclasses.replace(found, rows=rows))


def _forecast() -> Any:
    planned = forecast(name=HOSTILE, disk_bytes=2**30)
    return dataclasses.replace(planned, batch=dataclasses.replace(planned.batch, source=HOSTILE))


def plan(_: RunDirectory) -> View:
    levers = ((Lever({"training.micro_batch": 1}, HOSTILE), _forecast()),)
    return PlanView(Plan(Config(), _forecast(), levers))


def serving(_: RunDirectory) -> View:
    planned = _forecast()
    return ServingView(
        Serving(
            device=planned.device, attention=HOSTILE, peak_allocated_bytes=1, peak_reserved_bytes=1, host_bytes=1,
            phases=planned.phases, categories=planned.categories, rows=2, context=64, cache="dynamic", cache_bytes=1,
        )
    )  # fmt: skip


def _fitted() -> Fitted:
    return Fitted(Config(), _forecast(), {"training.micro_batch": HOSTILE}, tried=1, find_everything=_forecast)


def chosen(_: RunDirectory) -> View:
    return ChosenView(_fitted())


def fitted(_: RunDirectory) -> View:
    return FittedView(_fitted(), Limits(1, 2, 3, HOSTILE), Path(HOSTILE))


def runs(run: RunDirectory) -> View:
    other = RunDirectory(run.path.with_name(HOSTILE.replace("/", "")))
    shutil.copytree(run.path, other.path)
    write_text(other.config_file, dump(Config.model_validate({"data": {"train": HOSTILE}})))
    return finetune.compare([run, other])


def result(run: RunDirectory) -> View:
    return Result(shutil.copytree(run.path, run.path.with_name(HOSTILE.replace("/", ""))))  # type: ignore[arg-type]


def sweep(run: RunDirectory) -> View:
    other = RunDirectory(shutil.copytree(run.path, run.path.with_name("2" + HOSTILE.replace("/", ""))))
    difference = {"value": 0.1, "low": None, "high": 0.2}
    settings = [
        SettingResult(HOSTILE, {HOSTILE: HOSTILE}, [str(run.path)], "finished", 1.0, 2.0, None, "", 9.0),
        SettingResult("other", {}, [str(other.path)], "stopped", 0.25, 2.1, difference, HOSTILE, 3.0),
    ]
    return SweepView(SweepTable(Path(HOSTILE), settings, 8, None, HOSTILE))


def scores(_: RunDirectory) -> View:
    figure = {"value": 1234.6, "low": None, "high": None}
    measure = {"name": HOSTILE, "better": "lower", "rows": 8, "models": {"base": figure}}
    record: Any = {"steps": 9, "interval": HOSTILE, "notes": [HOSTILE], "settings": {}, "measures": [measure]}
    return Scores(record)


def examination(_: RunDirectory) -> View:
    return Examination([Finding("disk", "error", HOSTILE, HOSTILE)], 4)


# A font of the picture has no glyph for them either.
pytestmark = pytest.mark.filterwarnings("ignore:Glyph .* missing")

VIEWS = (data, plan, serving, chosen, fitted, runs, result, sweep, scores, examination)
Made = Callable[[RunDirectory], View]


def subclasses(view: type[View]) -> set[type[View]]:
    return {view, *(one for below in view.__subclasses__() for one in subclasses(below))}


def test_every_view_is_held_to_these_rules(run: RunDirectory) -> None:
    assert {type(make(run)) for make in VIEWS if make is not result} | {Result} == subclasses(View) - {View, PageView}


def printed(view: View, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    view.show(Console(file=file, width=300))
    file.seek(0)
    return file.read()


@pytest.mark.parametrize("make", VIEWS)
def test_text_has_no_control_characters_and_prints_markup_as_it_is(make: Made, run: RunDirectory) -> None:
    for text in (printed(view := make(run)), str(view)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u200b\u2028]", text)
        assert "[bold]" in text


@pytest.mark.parametrize("make", VIEWS)
def test_a_console_that_knows_ascii_alone_gets_ascii(make: Made, run: RunDirectory) -> None:
    assert printed(make(run), "ascii").isascii()


@pytest.mark.parametrize("make", VIEWS)
def test_what_programs_get_is_json(make: Made, run: RunDirectory) -> None:
    values = make(run).as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)).keys() == values.keys()


def markup_of(view: View) -> list[str]:
    """What a notebook shows, and the page."""
    notebook = view._repr_html_()
    return [*([notebook] if notebook else []), *([view.page()] if isinstance(view, PageView) else [])]


@pytest.mark.parametrize("make", VIEWS)
def test_markup_loads_nothing_and_runs_nothing_of_what_it_shows(make: Made, run: RunDirectory) -> None:
    for document in markup_of(make(run)):
        reader = Reader(document)
        assert [link for link in reader.references if not link.startswith("data:image/png;base64,")] == []
        assert not reader.tags & {"link", "iframe", "object", "form"}
        assert "<script>alert" not in document
        assert not re.search(r"url\(|@import", document)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200b]", document)


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w(?:[\w.,%:]*[\w%])?", text))


@pytest.mark.parametrize("make", VIEWS)
def test_page_and_notebook_say_what_the_terminal_says(make: Made, run: RunDirectory) -> None:
    view = make(run)
    for document in markup_of(view):
        text = html.unescape(re.sub(r"<[^>]*>", " ", document.replace("<wbr>", "")))
        # A notebook's own code says which run it is, and its table needs no title for a column.
        aside = f"value {visible(str(view.run.path))}" if isinstance(view, Result) else ""
        assert words_of(printed(view)) - words_of(aside) - words_of(text) == set()
