"""The page of a sweep compares like with like, and no value out of scale hides the others."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from report_lines import evaluation_line, training_line
from rich.console import Console

from finetune.config import Config
from finetune.extras.sweeps.table import SettingResult, SweepTable
from finetune.extras.sweeps.view import SweepView
from finetune.storage.files import write_lines
from finetune.storage.rundir import RunDirectory


def setting(
    rate: float, above: float | None, share: float = 1.0, rank: int = 8, runs: list[str] | None = None, **fields: Any
) -> SettingResult:
    """One that is `above` the best in its loss after `share` of a run, by 0.01 more or less; None if it diverged."""
    state = "diverged" if above is None else "finished" if share == 1 else "stopped"
    difference = {"value": above, "low": above - 0.01, "high": above + 0.01} if above else None
    loss, name = None if above is None else 3 + above, f"learning_rate={rate:g},rank={rank}"
    values = {"training.learning_rate": rate, "adapter.rank": rank}
    return SettingResult(name, values, runs or [], state, share, loss, difference, "", 10 * share, **fields)  # type: ignore[arg-type]


def view_of(*settings: SettingResult, folder: Path = Path("sweep")) -> SweepView:
    return SweepView(SweepTable(folder, settings, 40, settings[0].setting, ""))


def drawn(chart: dict[str, Any]) -> dict[str, list[Any]]:
    return {series["name"]: series["values"] for series in chart["tables"][0]["series"]}


def said(chart: dict[str, Any], name: str) -> list[str]:
    [series] = [series for series in chart["tables"][0]["series"] if series["name"] == name]
    return series["texts"]


def test_settings_of_part_of_a_run_have_a_mark_of_their_own() -> None:
    chart = view_of(setting(1e-3, 0), setting(3e-3, 0.2), setting(1e-4, 0.3, 0.25)).charts()[0]
    assert chart["labels"] == ["0.0001", "0.001", "0.003"]
    assert drawn(chart)["whole run"] == [None, 0, 0.2]
    assert drawn(chart)["95%, high"] == [None, 0, 0.21]
    assert drawn(chart)["part of a run"] == [0.3, None, None]
    assert said(chart, "part of a run") == ["+0.3000 after 25.0%", "", ""]
    assert "off the scale" not in drawn(chart)


def test_of_the_settings_with_a_value_one_of_a_whole_run_counts() -> None:
    """Though one of another rank was nearer to the best when it was stopped."""
    settings = setting(1e-3, 0), setting(3e-3, 0.2), setting(3e-3, 0.1, 0.25, rank=16)
    by_rate, by_rank = view_of(*settings).charts()
    assert drawn(by_rate)["whole run"] == [0, 0.2]
    assert "part of a run" not in drawn(by_rate)
    assert drawn(by_rank)["part of a run"] == [None, 0.1]


def test_a_value_far_above_those_of_whole_runs_does_not_set_the_scale() -> None:
    chart = view_of(setting(1e-3, 0), setting(3e-3, 0.2), setting(1e-2, 0.8, 0.5), setting(1e-1, 7, 0.5),
                    setting(1.0, None, 0.125)).charts()[0]  # fmt: skip
    numbers = [value for values in drawn(chart).values() for value in values if value is not None]
    assert max(numbers) < 1
    assert said(chart, "part of a run")[2] == "+0.8000 after 50.0%"
    assert said(chart, "off the scale")[3:] == ["+7.0000 after 50.0%", "diverged after 12.5%"]


def test_rates_are_on_a_logarithmic_axis_and_other_values_evenly_spaced() -> None:
    chart = view_of(setting(1e-4, 0), setting(1e-3, 0.1), setting(1e-1, 0.2)).charts()[0]
    assert chart["tables"][0]["steps"] == [0, 0.6667, 2]
    zero = view_of(setting(0.0, 0), setting(1e-3, 0.1), setting(1e-1, 0.2)).charts()[0]
    assert zero["tables"][0]["steps"] == [0, 1, 2]


def test_names_are_whole_in_a_terminal_of_80_columns() -> None:
    output = io.StringIO()
    view_of(setting(3e-5, 0), setting(1e-5, 0.2)).show(Console(file=output, width=80, force_terminal=True))
    assert "learning_rate=3e-05,rank=8 " in output.getvalue()


def trained(folder: Path, name: str, seed: int, losses: list[float]) -> RunDirectory:
    """A run of eight steps, so far with these losses."""
    run = RunDirectory(folder / name)
    run.create(Config.model_validate({"training": {"max_steps": 8, "seed": seed}}))
    run.event("started")
    steps = [training_line(step, loss) for step, loss in enumerate(losses, start=1)]
    write_lines(run.metrics_file, [evaluation_line(0, 4.0), *steps])
    return run


def two_seeds(folder: Path) -> SweepView:
    """A setting that was trained to its end, and one that was stopped in the middle, each with two seeds."""
    settings, whole = [], [4.0, 3.5, 3.4, 3.3, 3.2, 3.1, 3.1, 3.0]
    for rate, losses, share in ((1e-3, whole, 1.0), (1.0, [4.0, 9.0, 50.0, 90.0], 0.5)):
        runs = [trained(folder, f"learning_rate={rate:g},seed={seed}", seed, losses) for seed in (5, 7)]
        compared = [{"run": str(run.path), "share": at, "loss": 3.5 - at + place / 10}
                    for place, run in enumerate(runs) for at in (0.5, 1.0) if at <= share]  # fmt: skip
        above = 0.5 * (share < 1)
        settings.append(setting(rate, above, share, runs=[str(run.path) for run in runs], compared=compared))
    return view_of(*settings, folder=folder)


def test_curves_have_the_losses_by_which_runs_were_compared_and_none_that_diverges_sets_the_scale(
    tmp_path: Path,
) -> None:
    view = two_seeds(tmp_path)
    charts = {chart["title"]: chart for chart in view.charts()}
    points = {table["series"][0]["name"]: dict(zip(table["steps"], table["series"][0]["values"], strict=True))
              for table in charts["Evaluation loss"]["tables"]}  # fmt: skip
    assert points["learning_rate=0.001,seed=7"] == {0: 4.0, 4: 3.1, 8: 2.6}
    assert points["learning_rate=1,seed=5"] == {0: 4.0, 4: 3.0}
    assert charts["Training loss"]["top"] < 5
    assert charts["Training loss"]["unit"] == "smoothed, higher ones cut off"
    assert "top" not in charts["Evaluation loss"]
    assert view.values()["cost"] == "trained: 3 of 4 whole runs, in 0:15"
    assert view.values()["cost"] in view.page()


def test_no_line_breaks_within_a_rate(tmp_path: Path) -> None:
    settings = [SettingResult("learning_rate=1.5e-4", {}, [], "finished", 1.0, 3.0, None, "", 1.0)]
    assert "learning_<wbr>rate=1.5e-4<" in view_of(*settings, folder=tmp_path).page()
    assert json.dumps(view_of(*settings).charts()) == "[]"
