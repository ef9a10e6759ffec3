"""Measures reward models and classifiers, which score sequences, for `finetune eval`.

pairs of answers ─▶ how often the chosen one has the higher reward, beside the rule that the longer one wins
single answers   ─▶ the reward of each
labelled rows    ─▶ accuracy and macro F1, beside the rule that every row has the most frequent label
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.config import DataSection
from finetune.data import pairs, prepare
from finetune.data.encoded import lengths_of
from finetune.data.labelled import LABEL
from finetune.evaluation.intervals import Measured
from finetune.evaluation.model_results import ModelResults
from finetune.objectives import Objective, rewards
from finetune.training.eval_loss import HeldOut

ACCURACY, LONGER_WINS, MOST_FREQUENT = "accuracy", "the longer answer is the chosen one", "the most frequent label"
"""The measures of a reward model on pairs and of a classifier, and the rules that they should beat."""

_PAIRS = ("pairs", "pairs_with_margin")


@dataclass(frozen=True)
class ScoredRows:
    """The rows of an evaluation that a run's models score, and the objective that has such rows."""

    section: DataSection
    objective: Objective
    rows: Any
    left_out: Mapping[str, int]

    @classmethod
    def of(cls, section: DataSection, objective: Objective, tokenizer: Any) -> ScoredRows:
        """The evaluation set of a run with this objective. Of a reward model it may be of single answers.

        Raises DataError.
        """
        if section.format in _PAIRS:  # which only a reward model has
            fields = next(prepare.held_out_rows(section, tokenizer)).fields
            columns = {name: column for name, column in section.columns.items() if column in fields}
            if not pairs.FIELDS & {*fields, *columns}:
                section = section.model_copy(update={"format": "auto", "columns": columns})
                objective = rewards.ANSWERS
        rows, counts = prepare.prepare_held_out(section, tokenizer)
        return cls(section, objective, rows, counts.dropped_why)

    def measure(self, held_out: HeldOut) -> ModelResults:
        """The results of one model, with scores of each row."""
        loss, scores = held_out.scores(self.rows, self.objective)
        if self.section.labels:  # a classifier
            return self._classes(loss, scores[:, 0])
        if not self.objective.layout.segments:
            results = ModelResults(scores={"reward": scores.flatten().tolist()})
            results.add("reward", Measured.mean(results.scores["reward"]), None)
            return results
        chosen, rejected = scores[..., 0].T
        lengths = [lengths_of(row) for row in self.rows]
        results = ModelResults(scores={"chosen": chosen.tolist(), "rejected": rejected.tolist()})
        results.add("pair loss", Measured(loss), "lower")
        results.add(ACCURACY, Measured.mean((chosen > rejected).double().tolist()), "higher")
        results.add(LONGER_WINS, Measured.mean([float(one > other) for one, other in lengths]), None)
        return results

    def lines(self, by_model: Mapping[str, ModelResults]) -> list[dict[str, Any]]:
        """The lines of eval_answers.jsonl: each row with its scores by model, and of a classifier, its classes."""
        first, classes = next(iter(by_model.values())), self.section.labels
        wanted = [classes[int(label)] for label in self.rows[LABEL]] if classes else []
        return [
            {
                "row": location,
                **({"reference": wanted[at], "answers": {name: one.classes[at] for name, one in by_model.items()}}
                   if wanted else {}),
                "scores": {
                    score: {name: one.scores[score][at] for name, one in by_model.items()} for score in first.scores
                },
            }
            for at, location in enumerate(self.rows["place"])
        ]  # fmt: skip

    def notes(self) -> list[str]:
        """Remarks on rows without a score, by the reason."""
        return [f"{count} rows have no score: {why}." for why, count in self.left_out.items()]

    def _classes(self, loss: float, scores: torch.Tensor) -> ModelResults:
        """A class is given where its score alone is the highest: the base, whose scores are equal, gives none."""
        highest = scores.max(1, keepdim=True).values == scores  # (rows, labels)
        given = torch.where(highest.sum(1, keepdim=True) == 1, highest, False).long().numpy()
        classes = self.section.labels
        labels = np.asarray(self.rows[LABEL], dtype=np.int64)
        wanted = np.eye(len(classes), dtype=np.int64)[labels]
        right = (given * wanted).sum(axis=1)
        results = ModelResults(
            classes=[classes[one.argmax()] if one.any() else "" for one in given],
            scores={ACCURACY: right.astype(float).tolist()},
        )
        of_classes = np.hstack([given * wanted, given + wanted]).astype(np.float64)  # (rows, 2 labels)
        results.add("cross-entropy", Measured(loss), "lower")
        results.add(ACCURACY, Measured.mean(results.scores[ACCURACY]), "higher")
        f1 = _macro_f1(of_classes.sum(axis=0))
        results.add("macro F1", Measured(f1, of_classes, of_totals=_macro_f1), "higher")
        frequent = np.bincount(labels).argmax()
        results.add(MOST_FREQUENT, Measured.mean((labels == frequent).astype(float).tolist()), None)
        return results


def _macro_f1(totals: np.ndarray) -> float:
    """The mean over classes of 2 TP / (2 TP + FP + FN), from TP and then from that denominator, of each class.

    Classes that no row has and none is given are left out, as scikit-learn does.
    """
    hits, both = totals.reshape(2, -1)
    return float(np.mean(2 * hits[both > 0] / both[both > 0]))
