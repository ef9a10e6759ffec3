"""The result of a run: as a dict and a frame for programs, as a table and a plot for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune.report import printing, words
from finetune.report.figures import RECENT_STEPS, Figures, flat, framed, summary
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
        printing.table(console, ("", "value", ""), result_rows(self.run, self.figures), texts=("",))

    def values(self) -> dict[str, Any]:
        """The results, and whether there may be more."""
        return {"trained": self.figures.trained, "results": result_rows(self.run, self.figures)}

    def picture(self) -> bytes:
        """The plot of the run, if it was drawn."""
        return records.read_bytes(self.run.plot_file) if self.run.plot_file.is_file() else b""


def result_rows(run: RunDirectory, figures: Figures) -> list[tuple[str, str, str]]:
    """Losses, memory, speed and time: (name, value, detail)."""
    rows = []
    if figures.evaluations:
        rows.append(("eval loss, before and after", *_eval_loss(figures)))
    if figures.training:
        first, final = figures.training[0]["loss"], figures.final_loss
        rows.append(("training loss, first and last step", f"{words.loss(first)} → {words.loss(final)}",
                      f"{words.count(figures.steps)} steps"))  # fmt: skip
    span = f"mean of the last {words.count(min(RECENT_STEPS, figures.steps))} steps"
    for name, value in figures.recent_statistics.items():
        if value is not None:
            rows.append((words.statistic(name), words.number(value), span))
    if figures.peaks:
        starts = f"over {words.count(len(figures.starts))} starts; " if len(figures.starts) > 1 else ""
        rows.append(("peak memory", words.size(figures.peak_bytes), starts + _forecast(run)))
    if figures.tokens_per_second is not None:
        padding = "" if figures.padding_share is None else f", {words.share(figures.padding_share)} padding"
        rows.append(("speed", f"{words.count(figures.tokens_per_second)} tokens/s", f"median{padding}"))
    if figures.training:
        kind = (run.environment() or {"device": {"type": ""}})["device"]["type"]
        cost = f"{words.hours(figures.device_hours)} of {'GPU' if kind == 'cuda' else 'CPU'} time"
        rows.append(("duration", words.duration(figures.seconds), cost))
    return rows


def _eval_loss(figures: Figures) -> tuple[str, str]:
    """The eval loss of the base and of the published weights, and a remark."""
    base, exported, best = figures.base_eval_loss, figures.exported_evaluation, figures.best_evaluation
    value = words.loss(base)
    remarks = []
    if exported:
        value += f" → {words.loss(exported['eval_loss'])}"
        drop = "" if figures.relative_drop is None else f"{words.change(-figures.relative_drop)} "
        remarks.append(f"{drop}at step {words.count(exported['step'])}")
    elif figures.exported_step:
        remarks.append(f"the published weights of step {words.count(figures.exported_step)} were not evaluated")
    if figures.exported_step and exported:
        remarks[-1] += ", which was published"
    if best and exported and best["step"] != exported["step"]:
        remarks.append(f"best {words.loss(best['eval_loss'])} at step {words.count(best['step'])}")
    return value, "; ".join(remarks)


def _forecast(run: RunDirectory) -> str:
    """The forecast beside the measured peak: of reserved bytes on a GPU, of the tensors' bytes on a CPU.

    What libraries keep for themselves on a CPU is part of the peak and of the forecast, but is not predicted.
    """
    forecast = run.forecast()
    if forecast is None:
        return "no forecast was made"
    differences = forecast["differences"]
    needed = words.size(forecast["needed_bytes"])
    if differences and not any(one.phase in ("forward", "backward") for one in differences):
        return f"the last one took no step; its forecast was {needed}"
    budget = f"budget {words.size(forecast['budget_bytes'])}"
    for measure in ("reserved_bytes", "allocated_bytes"):
        compared = [one for one in differences if one.measure == measure]
        if measured := max((one.measured_bytes for one in compared), default=0):
            predicted = max(one.forecast_bytes for one in compared)
            text = f"{words.size(predicted)} ({words.change(predicted / measured - 1)})"
            tensors = measure == "allocated_bytes"
            return f"forecast {f'{needed}, of its tensors {text}' if tensors else text}, {budget}"
    return f"forecast {needed}, {budget}"
