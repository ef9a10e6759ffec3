"""`finetune sweep`: the settings by loss, on a terminal, as JSON, as a page, and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from finetune.report import curves, printing, words
from finetune.report.view import PageView
from finetune.results.figures import Figures, flat, framed
from finetune.results.sweep_table import SettingResult, SweepTable
from finetune.storage.rundir import RunDirectory

_HEAD = ("setting", "eval loss", "from the best", "training", "state")


@dataclass(frozen=True, repr=False)
class SweepView(PageView):
    """The settings of a sweep, the best first; `table` has the values, `winner` a setting or None."""

    table: SweepTable

    template = "sweep.html.j2"

    @property
    def winner(self) -> str | None:
        """The setting that no other can be mistaken for on the evaluation rows."""
        return self.table.winner

    def title(self) -> str:
        return f"Sweep of {len(self.table.settings)} settings"

    def as_dict(self) -> dict[str, Any]:
        """The table as JSON values: `settings`, the best first, `winner`, and why there is none (`undecided`)."""
        return self.table.as_dict()

    def frame(self) -> Any:
        """A `pandas.DataFrame` with a row a setting. Raises MachineError without pandas."""
        return framed([{**flat(each["values"]), **flat({**each, "values": {}})} for each in self.as_dict()["settings"]])

    def show(self, console: Console) -> None:
        values = self.values()
        head, rows = values["settings"]
        printing.table(console, head, rows, texts=("from the best", "state"))
        printing.say(console)
        printing.say(console, values["verdict"])

    def charts(self) -> list[dict[str, Any]]:
        runs = [RunDirectory(path) for each in self.table.settings for path in each.runs]
        return curves.of_runs({run.path.name: Figures.read(run) for run in runs if run.exists})

    def values(self) -> dict[str, Any]:
        """The table of settings, and the verdict."""
        table = self.table
        rows = f"{words.count(table.rows)} evaluation rows"
        verdict = f"winner: {table.winner}, on {rows}" if table.winner else f"no winner: {table.undecided} ({rows})"
        return {"settings": (_HEAD, [_row(each) for each in table.settings]), "verdict": verdict}

    def __repr__(self) -> str:
        return f"<sweep of {len(self.table.settings)} settings in {self.table.folder}>"


def _row(result: SettingResult) -> tuple[str, ...]:
    loss = "" if result.loss is None else words.loss(result.loss)
    at = "" if result.share in (0, 1) else f" at {words.share(result.share)}"
    state = f"{result.state}{at}{': ' * bool(result.why)}{result.why}"
    return result.setting, loss, _difference(result.difference), words.duration(result.seconds), state


def _difference(difference: dict[str, float | None] | None) -> str:
    if difference is None or difference["value"] is None:
        return ""
    if difference["low"] is None or difference["high"] is None:
        return f"{difference['value']:+.4f}"
    return f"{difference['value']:+.4f} ({difference['low']:+.4f} to {difference['high']:+.4f})"
