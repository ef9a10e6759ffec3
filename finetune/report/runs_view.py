"""`finetune compare`: runs side by side, on a terminal, as JSON, as a page, and in a notebook."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from finetune.report import curves, printing, words
from finetune.report.figures import Figures, flat, framed
from finetune.report.side_by_side import SideBySide
from finetune.report.view import PageView
from finetune.storage.rundir import RunDirectory

_ROWS = {
    "eval loss of the base": ("base_eval_loss", words.loss),
    "eval loss, published": ("exported_eval_loss", words.loss),
    "change": ("relative_drop", lambda drop: words.change(-drop)),
    "best eval loss": ("best_eval_loss", words.loss),
    "training loss, last step": ("final_train_loss", words.loss),
    "steps": ("steps", words.count),
    "tokens/s": ("tokens_per_second", words.count),
    "padding": ("padding_share", words.share),
    "peak memory": ("peak_bytes", words.size),
    "duration": ("seconds", words.duration),
    "time of all devices": ("device_hours", words.hours),
}
"""The table of results: by title, the key of the runs' summaries and how its value is written."""


@dataclass(frozen=True, repr=False)
class RunsView(PageView):
    """Runs by name, as they are on disk: what differs in their configs, and their results."""

    compared: SideBySide

    template = "compare.html.j2"

    @property
    def runs(self) -> dict[str, RunDirectory]:
        """The runs by name."""
        return self.compared.runs

    def title(self) -> str:
        return f"{len(self.runs)} runs side by side"

    def as_dict(self) -> dict[str, Any]:
        """`runs`: the summary of each (see `Result.summary`); `differences`: config keys, each with a value a run that
        has it; `unread`: what keeps this version from reading the config of a run, which another one wrote.
        """
        return self.compared.as_dict()

    def frame(self) -> Any:
        """A `pandas.DataFrame` with a row a run and flat columns: `run`, the summary's (`peaks.backward.resident_bytes`
        among them) and the config keys that differ. Raises MachineError without pandas.
        """
        compared = self.as_dict()
        return framed(
            [
                {
                    **flat({**summary, "run": name}),
                    **{key: each[name] for key, each in compared["differences"].items() if name in each},
                }
                for name, summary in compared["runs"].items()
            ]
        )

    def show(self, console: Console) -> None:
        tables = self.values()
        printing.table(console, *tables["results"])
        printing.say(console)
        head, rows = tables["settings"]
        if rows:
            printing.table(console, head, rows, texts=head[1:])
        else:
            printing.say(console, "their configs are the same")
        for line in tables["unread"]:
            printing.say(console, line)

    def charts(self) -> list[dict[str, Any]]:
        return curves.of_runs({name: Figures.read(run) for name, run in self.runs.items()})

    def values(self) -> dict[str, Any]:
        """The tables, with a column a run, and the configs that this version cannot read."""
        compared = self.as_dict()
        head = ("", *self.runs)
        settings = [
            (key, *(words.as_in_a_file(each[name]) if name in each else "" for name in self.runs))
            for key, each in compared["differences"].items()
        ]
        return {
            "results": (head, _results(compared["runs"].values())),
            "settings": (head, settings),
            "unread": [f"{name}: its config is of another version: {why}" for name, why in compared["unread"].items()],
        }

    def __repr__(self) -> str:
        return f"<comparison of {', '.join(self.runs)}>"


def _results(summaries: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the table that some run has a value for."""
    summaries = list(summaries)
    rows = [
        (title, *("" if one[key] is None else write(one[key]) for one in summaries))
        for title, (key, write) in _ROWS.items()
    ]
    recorded = [one.get("statistics", {}) for one in summaries]  # empty for runs whose objective has none
    for name in dict.fromkeys(itertools.chain.from_iterable(recorded)):
        rows.append((words.statistic(name), *(words.number(each.get(name)) for each in recorded)))
    return [row for row in rows if any(row[1:])]
