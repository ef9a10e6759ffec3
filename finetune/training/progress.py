"""Training progress, stored in checkpoints with the field names of transformers' `trainer_state.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import ArtifactError
from finetune.storage import records
from finetune.storage.rundir import checkpoint_step

FILE = "trainer_state.json"

# The field of each of its keys.
_NAMES = {
    "global_step": "step",
    "max_steps": "total",
    "epoch": "epoch",
    "best_global_step": "best_step",
    "best_metric": "best_loss",
    "evaluations_without_gain": "without_gain",
    "owes_evaluation": "owes_evaluation",
}


@dataclass
class Progress:
    """Completed steps of `total`, the same in epochs, and the best evaluation so far.

    `without_gain` counts the evaluations since the best one. `owes_evaluation`: a signal postponed an evaluation.
    `updates` are the steps that were not skipped; a checkpoint stores them with the schedule.
    """

    step: int = 0
    total: int = 0
    epoch: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None
    without_gain: int = 0
    owes_evaluation: bool = False
    updates: int = 0

    def as_json(self) -> dict[str, Any]:
        return {stored: getattr(self, name) for stored, name in _NAMES.items()}

    def gains(self, loss: float) -> bool:
        """Record an evaluation loss; return whether it is the lowest so far.

        Before the first update it is the base's, which is not a result of training.
        """
        if not self.updates:
            return False
        if self.best_loss is not None and loss >= self.best_loss:
            self.without_gain += 1
            return False
        self.best_step, self.best_loss, self.without_gain = self.step, loss, 0
        return True


def read_progress(folder: Path) -> Progress:
    """The progress of a checkpoint. Raises ArtifactError."""
    file = folder / FILE
    found = records.read(file, records.TRAINER_STATE)
    if found["global_step"] != checkpoint_step(folder):
        raise ArtifactError(f"{file}: `global_step` is {found['global_step']}, which is not the checkpoint's")
    values: dict[str, Any] = {**found}
    return Progress(**{name: values[stored] for stored, name in _NAMES.items() if stored in values})
