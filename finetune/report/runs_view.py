"""`finetune compare`: runs side by side, with the config keys that differ, on a terminal, as JSON, as a page, and in a
notebook.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune.config import as_written, gone_from
from finetune.config.field_types import shown
from finetune.errors import ArtifactError, ConfigError, first_line
from finetune.report import curves, printing, words
from finetune.report.figures import Figures, flat, framed, summary
from finetune.report.view import PageView
from finetune.storage.rundir import Run, RunDirectory, is_sweep

# A run's directory says nothing about what it trained.
_NO_DIFFERENCE = "output.dir"


def compare(runs: Sequence[Run]) -> RunsView:
    """Open runs to compare them; the directory of a sweep stands for its runs.

    Raises ArtifactError for a path without a run, ConfigError for fewer than two runs.
    """
    if isinstance(runs, (str, Path, RunDirectory)) or not isinstance(runs, Iterable):
        raise ConfigError(f"expected a list of runs to compare, not {shown(runs)}")
    opened = [RunDirectory.open(each) for run in runs for each in _members(run)]
    if len({run.path.resolve() for run in opened}) < max(2, len(opened)):
        raise ConfigError("give two run directories or more to compare, each once")
    names = [run.path.name for run in opened]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in opened]
    return RunsView(dict(zip(names, opened, strict=True)))


def _members(run: Run) -> list[Run]:
    """The runs of a sweep by name, or the run itself."""
    if not isinstance(run, (str, Path)) or not is_sweep(Path(run)):
        return [run]
    runs: list[Run] = [file.parent for file in sorted(Path(run).glob("*/config.yaml"))]
    if not runs:
        raise ArtifactError(f"{run}: no member of this sweep has been trained yet")
    return runs


def _differences(configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The config keys whose values are not the same in all runs, with the value of each run that has the key."""
    values: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        for section, keys in config.items():
            for key, value in keys.items():
                values.setdefault(f"{section}.{key}".rstrip("."), {})[name] = value
    return {
        key: each
        for key, each in values.items()
        if key != _NO_DIFFERENCE
        and (len(each) < len(configs) or any(value != next(iter(each.values())) for value in each.values()))
    }


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
    """Runs by name, read from disk on each access: what differs in their configs, and their results."""

    runs: dict[str, RunDirectory]

    template = "compare.html.j2"

    def title(self) -> str:
        return f"{len(self.runs)} runs side by side"

    def as_dict(self) -> dict[str, Any]:
        """`runs`: the summary of each (see `Result.summary`); `differences`: config keys, each with a value a run that
        has it; `unread`: what keeps this version from reading the config of a run, which another one wrote.
        """
        configs: dict[str, dict[str, Any]] = {}
        unread: dict[str, str] = {}
        for name, run in self.runs.items():
            try:
                configs[name] = run.config().model_dump(mode="json")
                if gone := ", ".join(one.key for one in gone_from(run.config_file)):
                    configs[name] = as_written(run.config_file)[0]
                    unread[name] = f"it has {gone}, unknown here"
            except ConfigError as error:
                configs[name], keys = as_written(run.config_file)
                unread[name] = f"it has {', '.join(keys)}, unknown here" if keys else first_line(error)
        summaries = {name: summary(run) for name, run in self.runs.items()}
        return {"runs": summaries, "differences": _differences(configs), "unread": unread}

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
        head, summaries = ("", *self.runs), [*compared["runs"].values()]
        results = [
            (title, *("" if one[key] is None else write(one[key]) for one in summaries))
            for title, (key, write) in _ROWS.items()
        ]
        recorded = [one.get("statistics", {}) for one in summaries]  # empty for runs whose objective has none
        for name in dict.fromkeys(itertools.chain.from_iterable(recorded)):
            results.append((words.statistic(name), *(words.number(each.get(name)) for each in recorded)))
        settings = [
            (key, *(words.as_in_a_file(each[name]) if name in each else "" for name in self.runs))
            for key, each in compared["differences"].items()
        ]
        return {
            "results": (head, [row for row in results if any(row[1:])]),  # that some run has a value for
            "settings": (head, settings),
            "unread": [f"{name}: its config is of another version: {why}" for name, why in compared["unread"].items()],
        }

    def __repr__(self) -> str:
        return f"<comparison of {', '.join(self.runs)}>"
