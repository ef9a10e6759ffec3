"""Training progress, stored in checkpoints with the field names of transformers' `trainer_state.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, with_config

from finetune.errors import ArtifactError
from finetune.storage import records
from finetune.storage.rundir import checkpoint_step

FILE = "trainer_state.json"


@with_config(ConfigDict(strict=True, extra="ignore"))
@dataclass
class Progress:
    """Completed steps of `total`, the same in epochs, and the best evaluation so far.

    `without_gain` counts the evaluations since the best one. `owes_evaluation`: a signal postponed an evaluation.
    `updates` are the steps that were not skipped; a checkpoint stores them with the schedule.
    """

    step: Annotated[records.StepIndex, Field(alias="global_step")] = 0
    total: Annotated[records.Count, Field(alias="max_steps")] = 0
    epoch: records.NonNegative = 0.0
    best_step: Annotated[records.StepIndex | None, Field(alias="best_global_step")] = None
    best_value: Annotated[records.Number | None, Field(alias="best_metric")] = None
    without_gain: Annotated[records.Count, Field(alias="evaluations_without_gain")] = 0
    owes_evaluation: bool = False
    updates: Annotated[int, Field(exclude=True)] = field(default=0, init=False)

    def as_json(self) -> dict[str, Any]:
        """The contents of the file."""
        values: dict[str, Any] = _SHAPE.dump_python(self, by_alias=True)
        return values

    def gains(self, value: float, *, higher_is_better: bool = False) -> bool:
        """Record the value of an evaluation; return whether it is the best since the first update."""
        if not self.updates:
            return False
        best = self.best_value
        if best is not None and (value <= best if higher_is_better else value >= best):
            self.without_gain += 1
            return False
        self.best_step, self.best_value, self.without_gain = self.step, value, 0
        return True


_SHAPE = TypeAdapter(Progress)


def read_progress(folder: Path) -> Progress:
    """The progress of a checkpoint. Raises ArtifactError."""
    file = folder / FILE
    progress = records.read(file, _SHAPE)
    if progress.step != checkpoint_step(folder):
        raise ArtifactError(f"{file}: `global_step` is {progress.step}, which is not the checkpoint's")
    return progress
