"""The scores of a run's models, measured by `finetune eval`: as JSON values, and as a table for terminal and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.report import pages
from finetune.report.printing import Cells
from finetune.storage.records import Evaluation
from finetune.storage.rundir import RunDirectory


@dataclass(frozen=True)
class Scores:
    """The contents of eval.json."""

    record: Evaluation

    @classmethod
    def read(cls, run: RunDirectory) -> Scores | None:
        """Those of a run, if it was evaluated. Raises ArtifactError if the file is damaged."""
        record = run.evaluation()
        return record and cls(record)

    @property
    def losses(self) -> dict[str, float | None]:
        """Loss on the evaluation set by model, in nats per trained token; empty if it was not measured."""
        measures = [measure for measure in self.record["measures"] if measure["name"] == "loss"]
        return {name: figure["value"] for measure in measures for name, figure in measure["models"].items()}

    def as_dict(self) -> dict[str, Any]:
        """As in eval.json."""
        return {**self.record}

    @property
    def table(self) -> Cells:
        """A line for each measure and model: value, interval, and the difference to the first model with its own."""
        rows = []
        for measure in self.record["measures"]:
            title = measure["name"]
            for model, figure in measure["models"].items():
                difference = figure.get("difference")
                change = (_number(difference["value"], sign="+"), _interval(difference, sign="+")) if difference else ()
                rows.append((title, model, _number(figure["value"]), _interval(figure), *(change or ("", ""))))
                title = ""
        first = next(iter(self.record["measures"][0]["models"])) if self.record["measures"] else "base"
        return ("measure", "model", "value", "interval", f"beside {first}", "interval"), rows

    @property
    def notes(self) -> list[str]:
        """How to read the table, in sentences."""
        return [f"Measured after step {self.record['steps']:,}. {self.record['interval']}", *self.record["notes"]]

    def _repr_html_(self) -> str:
        return pages.fragment("scores.html.j2", scores=self)


def _number(value: float | None, sign: str = "") -> str:
    """Four decimals, or four digits of what is larger than 100, such as a perplexity."""
    if value is None:
        return "not finite"
    return f"{value:{sign},.4f}" if abs(value) < 100 else f"{value:{sign},.4g}"


def _interval(figure: Any, sign: str = "") -> str:
    if figure["low"] is None or figure["high"] is None:
        return ""
    return f"{_number(figure['low'], sign)} to {_number(figure['high'], sign)}"
