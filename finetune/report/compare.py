"""`finetune compare`: runs side by side, on a terminal, as JSON, as a page, and in a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune.config import as_written
from finetune.config.field_types import shown
from finetune.errors import ConfigError, first_line
from finetune.report import curves, pages, printing, words
from finetune.report.figures import Figures
from finetune.report.result import Result, flat, framed
from finetune.storage.files import write_text
from finetune.storage.rundir import Run, RunDirectory

# Where a run lies says nothing of what it is.
_NO_DIFFERENCE = "output.dir"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs by name, as they are on disk: what differs in their configs, and their results."""

    runs: dict[str, RunDirectory]

    def as_dict(self) -> dict[str, Any]:
        """`runs`: the summary of each (see `Result.summary`); `differences`: config keys, each with a value a run that
        has it; `unread`: what keeps this version from reading the config of a run, which another one wrote.
        """
        configs = self._configs()
        return {
            "runs": {name: Result(run).summary() for name, run in self.runs.items()},
            "differences": self._differ(configs),
            "unread": {name: why for name, (_, why) in configs.items() if why},
        }

    def show(self, console: Console) -> None:
        """Print both tables."""
        found = self._tables()
        printing.table(console, *found["results"])
        printing.say(console)
        head, rows = found["settings"]
        if rows:
            printing.table(console, head, rows, texts=head[1:])
        else:
            printing.say(console, "their configs are the same")
        for line in found["unread"]:
            printing.say(console, line)

    def write(self, path: Path) -> None:
        """Write a self-contained HTML page, with the runs' curves over each other. Raises MachineError."""
        figures = {name: Figures.read(run) for name, run in self.runs.items()}
        title = f"{len(self.runs)} runs side by side"
        write_text(path, pages.page(title, "compare.html.j2", curves.of_runs(figures), **self._tables()))

    def frame(self) -> Any:
        """A `pandas.DataFrame` with a row a run and flat columns: `run`, the summary's (`peaks.backward.resident_bytes`
        among them) and the config keys that differ. Raises MachineError without pandas.
        """
        found = self.as_dict()
        return framed(
            [
                {
                    **flat({**summary, "run": name}),
                    **{key: each[name] for key, each in found["differences"].items() if name in each},
                }
                for name, summary in found["runs"].items()
            ]
        )

    def __str__(self) -> str:
        return printing.text(self.show)

    def __repr__(self) -> str:
        return f"<comparison of {', '.join(self.runs)}>"

    def _repr_html_(self) -> str:
        return pages.fragment("compare.html.j2", curves=[], **self._tables())

    def _tables(self) -> dict[str, Any]:
        found = self.as_dict()
        head = ("", *self.runs)
        rows = [
            (key, *(_as_in_a_file(each[name]) if name in each else "" for name in self.runs))
            for key, each in found["differences"].items()
        ]
        return {
            "results": (head, self._results(found["runs"].values())),
            "settings": (head, rows),
            "unread": [f"{name}: its config is of another version: {why}" for name, why in found["unread"].items()],
        }

    def _results(self, summaries: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
        """The rows of a table with a column a run."""
        summaries = list(summaries)
        writers = {
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
            "energy": ("joules", words.energy),
        }
        rows = [
            (title, *("" if one[key] is None else write(one[key]) for one in summaries))
            for title, (key, write) in writers.items()
        ]
        return [row for row in rows if any(row[1:])]

    def _configs(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Each run's config, and why this version cannot read it, if it cannot."""
        found: dict[str, tuple[dict[str, Any], str]] = {}
        for name, run in self.runs.items():
            try:
                found[name] = run.config().model_dump(mode="json"), ""
            except ConfigError as error:
                values, keys = as_written(run.config_file)
                found[name] = values, f"it has {', '.join(keys)}, unknown here" if keys else first_line(error)
        return found

    def _differ(self, configs: dict[str, tuple[dict[str, Any], str]]) -> dict[str, dict[str, Any]]:
        """The config keys whose values are not the same in all runs, with the value of each run that has the key."""
        values: dict[str, dict[str, Any]] = {}
        for name, (config, _) in configs.items():
            for section, keys in config.items():
                for key, value in keys.items():
                    values.setdefault(f"{section}.{key}".rstrip("."), {})[name] = value
        return {
            key: each
            for key, each in values.items()
            if key != _NO_DIFFERENCE
            and (len(each) < len(configs) or any(value != next(iter(each.values())) for value in each.values()))
        }


def _as_in_a_file(value: Any) -> str:
    """`true`, `null` and `[a, b]`, as a config has them, not as Python does."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def compare(runs: Sequence[Run]) -> Comparison:
    """Put runs side by side; a notebook shows the result, and `write(path)` makes a page of it.

    Raises ArtifactError for a path without a run, and ConfigError for fewer than two different runs.
    """
    if isinstance(runs, (str, Path, RunDirectory)) or not isinstance(runs, Iterable):
        raise ConfigError(f"expected a list of runs to compare, not {shown(runs)}")
    opened = [RunDirectory.open(run) for run in runs]
    if len({run.path.resolve() for run in opened}) < max(2, len(opened)):
        raise ConfigError("give two run directories or more to compare, each once")
    names = [run.path.name for run in opened]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in opened]
    return Comparison(dict(zip(names, opened, strict=True)))
