"""The result of a run: as a dict and a frame for programs, as a table and a plot for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune.report import page, printing, words
from finetune.report.figures import Figures, flat, framed, summary
from finetune.report.view import View
from finetune.storage import records
from finetune.storage.rundir import RunDirectory


@dataclass(frozen=True, repr=False)
class Picture:
    """A PNG that a notebook shows."""

    png: bytes

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True)
class Result(View):
    """The result of a run, given by its path too, read from the run directory on each access."""

    template = "results.html.j2"

    run: RunDirectory

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", RunDirectory.open(self.run))

    @property
    def figures(self) -> Figures:
        return Figures.read(self.run)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The optimizer steps, one line of metrics.jsonl each, such as `pandas.DataFrame` takes."""
        return self.figures.training

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations: `step`, `eval_loss` in nats per trained token, and `memory`."""
        return self.figures.evaluations

    def summary(self) -> dict[str, Any]:
        """The results as JSON values: losses in nats per trained token, memory in bytes, None for missing values.

        `relative_drop` is the relative reduction of the eval loss from the base to the published weights, or to the
        latest ones of a run that goes on; `device_hours` are `seconds` as hours times the ranks;
        `statistics` are the means of the objective's own over the last 20 steps.
        """
        return summary(self.run)

    def as_dict(self) -> dict[str, Any]:
        return self.summary()

    def table(self) -> Table:
        """Peak memory by phase, with a column for each measure."""
        return printing.drawn(
            *words.peak_table(self.figures.peaks), title="peak memory", title_justify="left", title_style="bold"
        )

    def plot(self) -> Picture:
        """Loss and peak memory by step, as a picture."""
        from finetune.report import plots  # imports matplotlib

        return Picture(plots.training(self.run).read_bytes())

    def frame(self) -> Any:
        """A `pandas.DataFrame` with a row a step, that of step 0 for the base's evaluation, and flat columns: `step`,
        `loss`, `eval_loss`, `memory.backward.resident_bytes`, ... Raises MachineError without pandas.
        """
        lines: dict[int, dict[str, Any]] = {}
        for line in [*self.evaluations, *self.metrics]:
            lines.setdefault(line["step"], {}).update(flat(line))
        return framed([{**lines[step]} for step in sorted(lines)])

    def show(self, console: Console) -> None:
        """Print the path and the results."""
        printing.say(console, str(self.run.path))
        printing.table(console, ("", "value", ""), page.result_rows(self.run, self.figures), texts=("",))

    def values(self) -> dict[str, Any]:
        """The results, and whether there may be more."""
        return {"trained": self.figures.trained, "results": page.result_rows(self.run, self.figures)}

    def picture(self) -> bytes:
        """The plot of the run, if it was drawn."""
        return records.read_bytes(self.run.plot_file) if self.run.plot_file.is_file() else b""
