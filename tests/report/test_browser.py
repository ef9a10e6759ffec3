"""The pages in a real browser, on a screen and on a phone, in light and dark: nothing clipped, loaded or unreadable."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forecasts import forecast
from jobs import sampled
from report_lines import MIB, evaluation_line, training_line
from test_data_view import inspection

from finetune.api import compare
from finetune.config import Config
from finetune.extras.pages import report as page
from finetune.extras.sweeps.table import SettingResult, SweepTable
from finetune.extras.sweeps.view import SweepView
from finetune.forecast.plan import Plan
from finetune.report.data_view import DataView
from finetune.report.forecast_view import PlanView
from finetune.storage.files import write_json, write_lines, write_text
from finetune.storage.rundir import RunDirectory

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

LONG = "a-name-without-any-place-to-break-a-line-" * 4
CHARTS = {"report": 5, "data": 0, "plan": 1, "compare": 6, "sweep": 8}

# Texts whose contrast with the background is below WCAG's AA (1.4.3): 4.5, and 3 from 24 pixels on.
CONTRAST = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => channels(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if ((channels(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const [low, high] = [luminance(style.color), luminance(ground(element))].sort((one, other) => one - other);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) found.push([walker.currentNode.data, ratio]);
  }
  return found;
}"""

# What reaches over the right edge of the window, or of a box that hides or scrolls what is too wide for it.
CLIPPED = """() => [...document.body.querySelectorAll("*")].filter((element) =>
  element.getBoundingClientRect().right > innerWidth + 1
  || (getComputedStyle(element).overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1)
).map((element) => element.outerHTML.slice(0, 200))"""

# The parts of table heads that a line may break between, and over how many lines each goes.
LINES_OF_PARTS = """() => [...document.querySelectorAll("th")].filter((head) => head.checkVisibility())
  .flatMap((head) => [...head.childNodes]).filter((part) => part.data && !part.data.includes(" ")).map((part) => {
    const range = document.createRange();
    range.selectNodeContents(part);
    return [part.data, range.getClientRects().length];
  })"""

# For each chart, whether anything is drawn.
DRAWN = """() => [...document.querySelectorAll(".chart canvas")].map((canvas) =>
  canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value))"""

# Resolves once a page of this width has been laid out and drawn.
DRAWN_ANEW = """(width) => new Promise((done) => {
  const look = () => requestAnimationFrame(innerWidth === width ? () => requestAnimationFrame(() => done()) : look);
  look();
})"""


def make_run(folder: Path, name: str, steps: int) -> RunDirectory:
    run = RunDirectory(folder / name)
    run.create(Config.model_validate({"data": {"train": f"{LONG}.jsonl"}, "adapter": {"rank": steps}}))
    run.event("started", seed=42, note=LONG)
    lines = [training_line(step, 4 / math.sqrt(step), forward=800, backward=900 + step, optimizer=850)
             for step in range(1, steps + 1)]  # fmt: skip
    write_lines(run.metrics_file, [evaluation_line(0, 4.0), *lines, evaluation_line(steps, 1.5)])
    run.event("trained", step=steps, memory={"load": {"resident_bytes": 700 * MIB}})
    text = {"question": LONG, "reference": "A name.", "before": LONG,
            "after": "<script>document.title = 'run'</script>"}  # fmt: skip
    write_json(run.answers_file, [text])
    write_json(run.environment_file, {"device": {"type": "cpu"}, "cpu_cores": 2, "threads": 2, "source_revision": LONG})
    split = {"rows": 1000, "tokens": 4000, "trained_tokens": 1000, "longest": 60}
    pieces = [{"text": " word", "trained": number % 7 < 3} for number in range(200)]
    row = {"place": f"{LONG}.jsonl:7", "tokens": 200, "trained_tokens": 90, "pieces": pieces}
    write_json(run.facts_file, {"train": split, "eval": None, "samples": [row]})
    run.plot_file.touch()
    page.write(run)
    return run


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report, a look at data, a plan, and two runs of different length compared, also as a sweep of two keys."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder, "short", 30), make_run(folder, "a_run_of_two-thousand-steps", 2000)]
    files = {name: folder / f"{name}.html" for name in ("data", "plan", "compare", "sweep")}
    write_text(files["data"], DataView(inspection()).page())
    write_text(files["plan"], PlanView(Plan(Config(), forecast(), ())).page())
    compare([run.path for run in runs]).write(files["compare"])
    SweepView(sweep_of(runs)).write(files["sweep"])
    return {"report": runs[1].report_file, **files}


def sweep_of(runs: list[RunDirectory]) -> SweepTable:
    """Each run as a setting of its own, the second stopped early."""
    values = {"training.learning_rate": 1e-4, "adapter.targets": "all-linear"}
    other = {"training.learning_rate": 2e-4, "adapter.targets": ["q_proj", "k_proj", "v_proj"]}
    apart, why = {"value": 0.2, "low": 0.1, "high": 0.3}, "its loss is 0.2000 above that of another"
    paths = [[str(run.path)] for run in runs]
    best = SettingResult("learning_rate=1e-4", values, paths[0], "finished", 1.0, 1.5, None, "", 30.0)
    last = SettingResult("learning_rate=2e-4", other, paths[1], "stopped", 0.25, 1.7, apart, why, 7.5)
    return SweepTable(runs[0].path.parent, [best, last], 100, best.setting, "")


def test_along_the_values_of_a_key_a_chart_names_them(browser: Any, pages: dict[str, Path]) -> None:
    view = browser.new_page(viewport={"width": 1280, "height": 900})
    view.goto(pages["sweep"].as_uri())
    for at, values in enumerate((["0.0001", "0.0002"], ['["q_proj", "k_proj", "v_proj"]', "all-linear"])):
        box = view.locator(".u-over").nth(at).bounding_box()
        for share, value in zip((0.25, 0.75), values, strict=True):
            view.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
            legend = view.locator(".u-legend").nth(at).locator(".u-value").all_inner_texts()
            assert legend[0] == value
            assert (legend[-1] == "+0.2000 after 25.0%") == (value in ("0.0002", '["q_proj", "k_proj", "v_proj"]'))
    view.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        playwright.expect.set_options(timeout=600_000)
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=600_000)
        yield launched
        launched.close()


@pytest.mark.parametrize(
    ("name", "scheme"),
    sampled(
        itertools.product(CHARTS, ("light", "dark")),
        *((name, "light") for name in CHARTS),
        ("report", "dark"),
        ("data", "dark"),
    ),
)
def test_a_page_is_whole_and_readable_on_a_screen_and_on_a_phone(
    browser: Any, pages: dict[str, Path], name: str, scheme: str
) -> None:
    view = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    asked, said = [], []
    view.on("request", lambda request: asked.append(request.url))
    view.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    view.on("pageerror", lambda error: said.append(str(error)))
    view.goto(pages[name].as_uri())
    title = view.title()
    for width in (1280, 390):
        view.set_viewport_size({"width": width, "height": 900})
        view.evaluate(DRAWN_ANEW, width)
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        assert view.evaluate(CLIPPED) == []
        assert view.evaluate(CONTRAST) == []
        assert view.evaluate(DRAWN) == [True] * CHARTS[name]
    assert said == []
    assert asked == [pages[name].as_uri()]
    assert title != "run"
    view.close()


def test_on_a_phone_the_names_of_runs_and_of_keys_break_between_words(browser: Any, pages: dict[str, Path]) -> None:
    view = browser.new_page(viewport={"width": 390, "height": 900})
    view.goto(pages["compare"].as_uri())
    lines = view.evaluate(LINES_OF_PARTS)
    parts = {part for part, _ in lines}
    assert {"a_", "run_", "two-", "thousand-", "steps", "adapter.", "rank"} <= parts
    assert {count for _, count in lines} == {1}
    view.close()


def test_curves_are_read_by_pointing_and_zoomed_by_dragging_with_all_charts_at_once(
    browser: Any, pages: dict[str, Path]
) -> None:
    view = browser.new_page(viewport={"width": 1280, "height": 900})
    view.goto(pages["report"].as_uri())

    def pictures() -> list[str]:
        return view.evaluate("[...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())")

    def legend() -> list[str]:
        return view.locator(".u-legend").first.locator(".u-value").all_inner_texts()

    view.evaluate(DRAWN_ANEW, 1280)
    box = view.locator(".u-over").first.bounding_box()
    whole, middle = pictures(), box["y"] + box["height"] / 2
    assert set(legend()) == {""}, "nothing is pointed at"
    squares = view.locator(".u-legend").first.locator(".u-marker")
    looks = squares.evaluate_all(
        "(all) => all.map(({style}) => [style.borderWidth, style.borderStyle, style.borderColor, style.background])"
    )
    assert len(set(map(tuple, looks))) == len(looks) > 1
    view.mouse.move(box["x"] + box["width"] - 1, middle)
    assert legend()[0] == "2,000"
    assert float(legend()[1]) == pytest.approx(4 / math.sqrt(2000), rel=1e-3)
    view.mouse.move(box["x"] + 100, middle)
    view.mouse.down()
    view.mouse.move(box["x"] + 200, middle, steps=3)
    view.mouse.up()
    view.evaluate(DRAWN_ANEW, 1280)
    assert all(before != after for before, after in zip(whole, pictures(), strict=True))
    view.mouse.dblclick(box["x"] + 150, middle)
    view.evaluate(DRAWN_ANEW, 1280)
    assert pictures() == whole
    view.close()


def test_two_fingers_zoom_all_charts_of_a_phone_and_a_button_shows_all_again(
    browser: Any, pages: dict[str, Path]
) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 900}, has_touch=True, is_mobile=True)
    view = context.new_page()
    view.goto(pages["report"].as_uri())
    over, button = view.locator(".u-over").nth(1), view.get_by_role("button", name="Show all")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    middle = box["y"] + box["height"] / 2
    assert button.count() == 0
    screen = context.new_cdp_session(view)

    def fingers(kind: str, *shares: float) -> None:
        points = [{"x": box["x"] + share * box["width"], "y": middle, "id": at} for at, share in enumerate(shares)]
        screen.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", 0.4, 0.6)
    fingers("touchMove", 0.3, 0.7)
    fingers("touchMove", 0.1, 0.9)
    fingers("touchEnd")
    playwright.expect(button).to_have_count(CHARTS["report"])
    view.touchscreen.tap(box["x"] + 0.1 * box["width"], middle)
    step = float(view.locator(".u-legend").nth(1).locator(".u-value").first.inner_text().replace(",", ""))
    assert step == pytest.approx(0.4 * 2000, abs=20)
    assert view.evaluate(CLIPPED) == []
    assert view.evaluate(CONTRAST) == []
    button.first.tap()
    playwright.expect(button).to_have_count(0)
    context.close()


def test_without_scripts_the_picture_is_named_and_a_script_that_is_not_the_pages_own_is_stopped(
    browser: Any, pages: dict[str, Path], tmp_path: Path
) -> None:
    context = browser.new_context(java_script_enabled=False)
    view = context.new_page()
    view.goto(pages["report"].as_uri())
    assert view.locator("noscript a").get_attribute("href") == "training.png"
    context.close()
    forged = tmp_path / "forged.html"
    forged.write_text(pages["report"].read_text().replace("</h1>", "</h1><script>document.title = 'run'</script>"))
    view = browser.new_page()
    view.goto(forged.as_uri())
    assert view.title() != "run"
    view.close()
