"""The scores of a run's models, measured by `finetune eval`: as JSON values, and as a table for terminal and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from finetune.report import printing, words
from finetune.report.printing import Cells
from finetune.report.view import View
from finetune.report.visible import LINES
from finetune.storage.records import EvaluationRecord
from finetune.storage.rundir import RunDirectory


@dataclass(frozen=True)
class Scores(View):
    """The contents of eval.json."""

    record: EvaluationRecord

    template = "scores.html.j2"

    @classmethod
    def read(cls, run: RunDirectory) -> Scores | None:
        """The scores of a run; None before its evaluation. Raises ArtifactError if the file is damaged."""
        record = run.evaluation()
        return record and cls(record)

    @property
    def losses(self) -> dict[str, float | None]:
        """Loss on the evaluation set by model, in nats per trained token; empty if it was not measured."""
        measures = [measure for measure in self.record["measures"] if measure["name"] == "loss"]
        return {name: figure["value"] for measure in measures for name, figure in measure["models"].items()}

    def as_dict(self) -> dict[str, Any]:
        return {**self.record}

    @property
    def table(self) -> Cells:
        """Below each measure a line for each model: value, interval, and the same of the difference to the first."""
        models = list(self.record["measures"][0]["models"]) if self.record["measures"] else [""]
        rows = []
        for measure in self.record["measures"]:
            rows.append((measure["name"], "", "", "", ""))
            for model, figure in measure["models"].items():
                difference = figure.get("difference")
                beside = (_number(difference["value"], "+"), _interval(difference, "+")) if difference else ("", "")
                rows.append((f"- {model}", _number(figure["value"]), _interval(figure), *beside))
        head = ("", "value", "interval", f"vs. {models[0]}", "interval")
        columns = len(head) if len(models) > 1 else 3
        return head[:columns], [row[:columns] for row in rows]

    @property
    def notes(self) -> list[str]:
        """Sentences that explain the table."""
        kept = [
            f"{name.capitalize()} keeps {words.share(share)} of what training took off the loss."
            for name, share in self.record.get("gain_kept", {}).items()
        ]
        measured = f"Measured after step {self.record['steps']:,}. {self.record['interval']}"
        return [measured, *kept, *self.record["notes"]]

    def show(self, console: Console) -> None:
        printing.table(console, *self.table)
        for note in self.notes:
            printing.say(console, note, keep=LINES)
        for folder, proof in self.record.get("exports", {}).items():  # a section of its own in the report
            printing.say(console, f"{folder}/, as exported: {words.served(proof)}", keep=LINES)

    def values(self) -> dict[str, Any]:
        """The scores themselves, whose table and notes the template takes."""
        return {"scores": self}


def _number(value: float | None, sign: str = "") -> str:
    """Four decimals below 10, otherwise two: as many as tell two losses or two perplexities apart."""
    return "not finite" if value is None else f"{value:{sign},.{4 if abs(value) < 10 else 2}f}"


def _interval(figure: Any, sign: str = "") -> str:
    if figure["low"] is None or figure["high"] is None:
        return ""
    return f"{_number(figure['low'], sign)} to {_number(figure['high'], sign)}"
