"""The result of a run: as a dict for programs, as a table and a plot for notebooks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from finetune.errors import MachineError
from finetune.report import page, printing
from finetune.report.figures import Figures, peak_table
from finetune.storage.rundir import RunDirectory


@dataclass(frozen=True, repr=False)
class Picture:
    """A PNG that a notebook shows."""

    png: bytes

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True)
class Result:
    """The result of a run, given by its path too, read from the run directory on each access."""

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
        `joules` are those of a run's one GPU, if its driver counts them and each start ended by itself.
        """
        figures = self.figures
        best, exported = figures.best_evaluation, figures.exported_evaluation
        return {
            "run": str(self.run.path),
            "steps": figures.steps,
            "final_train_loss": figures.final_loss,
            "base_eval_loss": figures.base_eval_loss,
            "final_eval_loss": figures.final_eval_loss,
            "best_eval_loss": best and best["eval_loss"],
            "best_step": best and best["step"],
            "exported_step": figures.exported_step,
            "exported_eval_loss": exported and exported["eval_loss"],
            "relative_drop": figures.relative_drop,
            "peaks": figures.peaks,
            "peak_bytes": figures.peak_bytes or None,
            "tokens_per_second": figures.tokens_per_second,
            "padding_share": figures.padding_share,
            "seconds": figures.seconds,
            "device_hours": figures.device_hours,
            "joules": figures.joules,
            "adapter": _existing(self.run.adapter),
            "merged": _existing(self.run.merged),
            "report": _existing(self.run.report_file),
            "plot": _existing(self.run.plot_file),
        }

    def table(self) -> Table:
        """Peak memory by phase, with a column for each measure."""
        return printing.drawn(
            *peak_table(self.figures.peaks), title="peak memory", title_justify="left", title_style="bold"
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

    def __str__(self) -> str:
        rows = page.result_rows(self.run, self.figures)
        shown = printing.text(lambda console: printing.table(console, ("", "value", ""), rows, texts=("",)))
        return f"{self.run.path}\n{shown}"

    def _repr_html_(self) -> str:
        return page.results(self.run)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their path, `memory.backward.resident_bytes`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def framed(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A `pandas.DataFrame` of rows, of which each may lack some columns. Raises MachineError without pandas."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise MachineError("a frame needs the package pandas: pip install pandas") from None
    return pandas.DataFrame(rows)


def _existing(path: Path) -> str | None:
    return str(path) if path.exists() else None
