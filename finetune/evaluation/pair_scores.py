"""Measures the objective of a preference run and its statistics on held-out rows for `finetune eval`.

The reference is the base, scored once for all models. A row, of a pair or of one labelled answer, is measured by
itself, so that each has its statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from finetune.config import Config
from finetune.data import prepare
from finetune.data.encoded import segments_of
from finetune.evaluation.intervals import Measured
from finetune.evaluation.model_results import ModelResults
from finetune.evaluation.sequence_scores import ACCURACY, LONGER_WINS
from finetune.objectives import OBJECTIVES, Batch, Objective, cross_entropy
from finetune.objectives.kto import LABELLED
from finetune.objectives.preference import PAIRS, reference_column
from finetune.objectives.starting_model import adapter_off
from finetune.training.collator import apart
from finetune.training.eval_loss import HeldOut
from finetune.training.reference_scores import scoring

LOSS, LOSS_OF_ANSWERS, LIKELIER = "pair loss", "answer loss", "the chosen answer is likelier"
REFERENCE_NOTE = "The base is the reference: its rewards are 0, and equal rewards are no win."
_NAMES: dict[str, tuple[str, Literal["higher", "lower"] | None]] = {
    "rewards_accuracies": (ACCURACY, "higher"), "rewards_margins": ("reward margin", "higher"),
}  # fmt: skip
"""Names of statistics in tables, and which values are better; others keep theirs."""


@dataclass
class ComparedPairs:
    """The held-out pairs, or labelled answers, of a run, which its models are measured on."""

    objective: Objective
    rows: Any
    _scored: bool = field(default=False, init=False)

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> ComparedPairs | None:
        """The pairs of the evaluation set; None if the run has no preferences, or a reference other than the base."""
        objective = OBJECTIVES.get(config.training.objective)
        known = (PAIRS.segments, LABELLED.segments)
        if objective is None or objective.layout.segments not in known or objective.evaluated is cross_entropy:
            return None
        if objective.reference and not config.adapter.starts_at_zero:
            return None
        objective = objective.bound(config.preference)
        return cls(objective, prepare.prepare_held_out(config.data, tokenizer)[0])

    @property
    def needs_reference(self) -> bool:
        """Whether the base has yet to score the pairs."""
        return self.objective.reference and not self._scored

    @property
    def of_pairs(self) -> bool:
        """Whether a row has two answers, one against the other."""
        return self.objective.layout.segments == PAIRS.segments

    def score_reference(self, held_out: HeldOut) -> None:
        """Give the rows their log-probabilities under the model without its adapter."""
        segments, by_pass = self.objective.layout.segments, []
        passes: list[Callable[[Batch], Batch]] = [lambda inputs: inputs, *([apart] if self.objective.step_mean else [])]
        with adapter_off(held_out.model):
            for part in passes:
                sums: list[torch.Tensor] = []
                held_out.sums(self.rows, self.objective.layout, scoring(sums), part)
                by_pass.append(torch.stack(sums))
        columns = tuple(map(reference_column, segments))
        for name, values in zip(columns, torch.cat(by_pass, 1).cpu().numpy().T, strict=True):
            self.rows = self.rows.add_column(name, values)
        layout = replace(self.objective.layout, values=(*self.objective.layout.values, *columns))
        self.objective, self._scored = replace(self.objective, layout=layout), True

    def measure(self, held_out: HeldOut) -> ModelResults:
        """The results of one model; the base without its adapter scores the rows first, if it has not yet.

        What the objective needs the mean of over a step, it gets over all rows.
        """
        if self.needs_reference:
            self.score_reference(held_out)
        layout, mean, sums = self.objective.layout, Batch(), list[torch.Tensor]()
        if self.objective.step_mean:
            total, count = held_out.sums(self.rows, layout, self.objective.step_mean, apart)
            mean = {"step_mean": torch.tensor(total / count, device=held_out.model.device)}

        def watched(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            total, count, *statistics = self.objective.evaluated(model, batch)
            pairs = [(total, count), *(statistics[0].values() if statistics else ())]
            sums.append(torch.stack([torch.stack([one.double() for one in pair]) for pair in pairs]))
            return total, count

        held_out.sums(self.rows, layout, watched, lambda inputs: inputs | mean)
        loss = LOSS if self.of_pairs else LOSS_OF_ANSWERS
        by_row = torch.stack(sums).cpu().numpy()  # (rows, 1 + statistics, 2)
        measured = dict(zip((loss, *self.objective.statistics), by_row.swapaxes(0, 1), strict=True))
        results = ModelResults()
        results.add(loss, _mean(measured.pop(loss)), "lower")
        there = [name for name, sums in measured.items() if sums[:, 1].any()]  # answers of one kind may be missing
        for name in sorted(there, key=lambda name: name not in _NAMES):
            said, better = _NAMES.get(name, (name.replace("_", " "), None))
            results.add(said, _mean(measured[name]), better)
        if not self.of_pairs:
            return results
        if {"logps_chosen", "logps_rejected"} <= measured.keys():
            likelier = measured["logps_chosen"][:, 0] > measured["logps_rejected"][:, 0]
            results.add(LIKELIER, Measured.mean(likelier.astype(float).tolist()), None)
        lengths = [[segment.trained for segment in segments_of(row)] for row in self.rows]
        results.add(LONGER_WINS, Measured.mean([float(one > other) for one, other in lengths]), None)
        return results

    def notes(self, by_model: Mapping[str, ModelResults]) -> list[str]:
        """Remarks for readers of the table."""
        return [REFERENCE_NOTE] if self.objective.reference and "base" in by_model else []


def _mean(sums: np.ndarray) -> Measured:
    """The mean by sums and counts (rows, 2)."""
    return Measured(float(sums[:, 0].sum() / sums[:, 1].sum()), sums)
