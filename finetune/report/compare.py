"""`finetune compare`: runs side by side, on a terminal, as JSON, as a page, and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune.errors import ConfigError
from finetune.report import curves, pages, printing, words
from finetune.report.figures import Figures
from finetune.report.result import Result
from finetune.storage.files import write_text
from finetune.storage.rundir import RunDirectory

# Where a run lies says nothing of what it is.
_NO_DIFFERENCE = "output.dir"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs by name, as they are on disk: what differs in their configs, and their results."""

    runs: dict[str, RunDirectory]

    def as_dict(self) -> dict[str, Any]:
        """`runs`: the summary of each (see `Result.summary`); `differences`: config keys, each with a value a run."""
        return {"runs": {name: Result(run).summary() for name, run in self.runs.items()}, "differences": self._differ()}

    def show(self, console: Console) -> None:
        """Print both tables."""
        printing.table(console, *self._results())
        head, rows = self._settings()
        printing.say(console)
        if rows:
            printing.table(console, head, rows, texts=head[1:])
        else:
            printing.say(console, "their configs are the same")

    def write(self, path: Path) -> None:
        """Write a self-contained HTML page, with the runs' curves over each other. Raises MachineError."""
        figures = {name: Figures.read(run) for name, run in self.runs.items()}
        title = f"{len(self.runs)} runs side by side"
        write_text(path, pages.page(title, "compare.html.j2", curves.of_runs(figures), **self._tables()))

    def __repr__(self) -> str:
        return f"<comparison of {', '.join(self.runs)}>"

    def _repr_html_(self) -> str:
        return pages.fragment("compare.html.j2", curves=[], **self._tables())

    def _tables(self) -> dict[str, printing.Cells]:
        return {"results": self._results(), "settings": self._settings()}

    def _results(self) -> printing.Cells:
        summaries = self.as_dict()["runs"].values()
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
            "device hours": ("device_hours", words.hours),
        }
        rows = [
            (title, *("" if one[key] is None else write(one[key]) for one in summaries))
            for title, (key, write) in writers.items()
        ]
        return ("", *self.runs), [row for row in rows if any(row[1:])]

    def _settings(self) -> printing.Cells:
        return ("", *self.runs), [(key, *map(str, values.values())) for key, values in self._differ().items()]

    def _differ(self) -> dict[str, dict[str, Any]]:
        """The config keys whose values are not the same in all runs, with each run's."""
        configs = {name: run.config().model_dump(mode="json") for name, run in self.runs.items()}
        first = next(iter(configs.values()))
        return {
            f"{section}.{key}": {name: config[section][key] for name, config in configs.items()}
            for section, values in first.items()
            for key, value in values.items()
            if f"{section}.{key}" != _NO_DIFFERENCE
            and any(config[section][key] != value for config in configs.values())
        }


def compare(runs: Sequence[RunDirectory | str | Path]) -> Comparison:
    """Put runs, or those at paths, side by side; a notebook shows the result, and `write(path)` makes a page of it.

    Raises ArtifactError for a path without a run, and ConfigError for fewer than two different runs.
    """
    opened = [run if isinstance(run, RunDirectory) else RunDirectory.open(run) for run in runs]
    if len({run.path.resolve() for run in opened}) < max(2, len(opened)):
        raise ConfigError("give two run directories or more to compare, each once")
    names = [run.path.name for run in opened]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in opened]
    return Comparison(dict(zip(names, opened, strict=True)))
