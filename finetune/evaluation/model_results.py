"""The results of one model in an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from finetune.evaluation.intervals import Measured
from finetune.generation.answering import Answer


@dataclass
class ModelResults:
    """The measurements of one model by name; `better` says which values are better.

    `answers`, the `classes` that a classifier gave, and `scores`, by name as well, have an entry for each row.
    """

    measured: dict[str, Measured] = field(default_factory=dict)
    better: dict[str, Literal["higher", "lower"] | None] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, measured: Measured, better: Literal["higher", "lower"] | None) -> None:
        """Add a measure."""
        self.measured[name], self.better[name] = measured, better
