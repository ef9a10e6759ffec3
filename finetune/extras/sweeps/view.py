"""`finetune sweep`: the settings by loss, on a terminal, as JSON, as a page, and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune.extras.sweeps import charts
from finetune.extras.sweeps.table import SettingResult, SweepTable
from finetune.report import curves, printing, words
from finetune.report.figures import Figures, flat, framed
from finetune.report.view import PageView
from finetune.storage.rundir import RunDirectory

_WHOLE_NAME = 32
"""Characters of a setting that a table of 80 columns leaves in one line."""
_HEAD = ("setting", "eval loss", "from the best", "training", "state")


@dataclass(frozen=True, repr=False)
class SweepView(PageView):
    """The settings of a sweep, the best first; `table` has the values, `winner` a setting or None."""

    table: SweepTable

    template = "sweep.html.j2"

    @property
    def winner(self) -> str | None:
        """The setting that no other can be mistaken for on the evaluation rows and seeds."""
        return self.table.winner

    def title(self) -> str:
        return f"Sweep of {len(self.table.settings)} settings"

    def as_dict(self) -> dict[str, Any]:
        """The table as JSON values: `settings`, the best first, `winner`, why there is none
        (`undecided`), and what the intervals leave out (`note`).
        """
        return self.table.as_dict()

    def frame(self) -> Any:
        """A `pandas.DataFrame` with a row a setting. Raises MachineError without pandas."""
        return framed([{**flat(each["values"]), **flat({**each, "values": {}})} for each in self.as_dict()["settings"]])

    def show(self, console: Console) -> None:
        values = self.values()
        head, rows = values["settings"]
        are_short = max(len(row[0]) for row in rows) <= _WHOLE_NAME
        printing.table(console, head, rows, texts=("from the best", "state"), whole_names=are_short)
        printing.say(console)
        printing.say(console, values["verdict"])
        printing.say(console, values["cost"])

    def charts(self) -> list[dict[str, Any]]:
        runs = [RunDirectory(path) for each in self.table.settings for path in each.runs]
        compared = [one for each in self.table.settings for one in each.compared]
        figures = {run.path.name: _with_rounds(run, compared) for run in runs if run.exists}
        whole = {Path(run).name for each in self.table.settings if each.state == "finished" for run in each.runs}
        return [*_by_key(self.table.settings), *charts.within_sight(curves.of_runs(figures), whole)]

    def values(self) -> dict[str, Any]:
        """The table of settings, the verdict, and what was trained."""
        table = self.table
        rows = f"{words.count(table.rows)} evaluation rows"
        verdict = f"winner: {table.winner}, on {rows}" if table.winner else f"no winner: {table.undecided} ({rows})"
        verdict += f"; {table.note}" if table.note else ""
        runs = sum(len(each.runs) for each in table.settings)
        trained = sum(each.share * len(each.runs) for each in table.settings)
        seconds = words.duration(sum(each.seconds for each in table.settings))
        return {
            "settings": (_HEAD, [_row(each) for each in table.settings]),
            "verdict": verdict,
            "cost": f"trained: {trained:.3g} of {words.count(runs)} whole runs, in {seconds}",
        }

    def __repr__(self) -> str:
        return f"<sweep of {len(self.table.settings)} settings in {self.table.folder}>"


def _by_key(settings: Sequence[SettingResult]) -> list[dict[str, Any]]:
    """A chart for each swept key: how far the best setting with each of its values is from the best one of all.

    Of settings with the same value, the one that was compared after the largest share of a run counts.
    """
    drawn = []

    def above(result: SettingResult) -> float:
        """How far the loss of a setting is above that of the best after the same share of a run."""
        return (result.difference or {}).get("value") or 0.0

    tried = [one for one in settings if one.loss is not None or one.state == "diverged"]
    tried.sort(key=lambda one: (one.loss is None, -one.share, above(one)))
    for key in settings[0].values:
        best: dict[str, SettingResult] = {}
        for each in tried:
            if key in each.values:
                best.setdefault(words.as_in_a_file(each.values[key]), each)
        if len(best) > 1:
            points = []
            for each in best.values():
                difference, value = each.difference or {}, above(each)  # of the best itself there is none
                interval = difference.get("low", value), value, difference.get("high", value)
                points.append(charts.ByValue(each.values[key], None if each.loss is None else interval, _early(each)))
            points.sort(key=lambda point: _order(point.value))
            title = f"Loss above the best, by {key.rpartition('.')[2]}"
            drawn.append(charts.by_value(title, "nats per trained token", key, points))
    return drawn


def _early(result: SettingResult) -> str:
    """After how much of a run a setting was compared last; empty after a whole one."""
    return "" if result.share in (0, 1) else words.share(result.share)


def _with_rounds(run: RunDirectory, compared: Sequence[Mapping[str, Any]]) -> Figures:
    """The figures of a run, among its evaluations those by which it was compared."""
    figures, training = Figures.read(run), run.config().training
    evaluations = {line["step"]: line for line in figures.evaluations}
    done = [
        (line["step"], line["step"] / training.max_steps if training.max_steps else line["epoch"] / training.epochs)
        for line in figures.training
    ]  # the share of the run after each step
    for one in compared:
        if one["run"] == str(run.path):
            step = next((step for step, share in done if share >= one["share"]), None)
            if step is not None:
                evaluations.setdefault(step, {"step": step, "eval_loss": one["loss"]})
    return replace(figures, evaluations=[evaluations[step] for step in sorted(evaluations)])


def _order(value: Any) -> tuple[bool, float, str]:
    """The key to sort values by: numbers by size, before others by spelling."""
    is_number = isinstance(value, (int, float))
    return not is_number, value if is_number else 0.0, words.as_in_a_file(value)


def _row(result: SettingResult) -> tuple[str, ...]:
    loss = "" if result.loss is None else words.loss(result.loss)
    above, difference = "", result.difference
    if difference and difference["value"] is not None:
        above = f"{difference['value']:+.4f}"
        if difference["low"] is not None and difference["high"] is not None:
            above += f" ({difference['low']:+.4f} to {difference['high']:+.4f})"
    state: str = result.state
    if early := _early(result):
        state += f" at {early}"
    if result.why:
        state += f": {result.why}"
    return result.setting, loss, above, words.duration(result.seconds), state
