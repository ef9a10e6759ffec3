"""Experiment trackers, which also receive the metrics of the run directory. A new one is one entry in TRACKERS."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config import Config, TrackingSection
from finetune.errors import MachineError, first_line
from finetune.storage.rundir import RunDirectory

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker


@dataclass(frozen=True)
class Tracker:
    """One of accelerate's trackers: the package it needs, and its argument for the run's name."""

    help: str
    package: str
    run_name: str | None = None


TRACKERS: dict[str, Tracker] = {
    "tensorboard": Tracker("event files in the run directory", "tensorboard"),
    "wandb": Tracker("Weights & Biases", "wandb", "name"),
    "mlflow": Tracker("MLflow", "mlflow", "run_name"),
    "trackio": Tracker("Trackio, local first", "trackio", "name"),
}


def check(section: TrackingSection) -> None:
    """Raise MachineError naming the package to install if a tracker is missing."""
    for name in section.to:
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise MachineError(f"`tracking.to: {name}` needs the package {package}: pip install {package}")


class Trackers:
    """The trackers of `section` for one run, through accelerate, which reports from rank 0 only.

    Raises MachineError if one cannot start. One that fails later is dropped with a note, since the run directory has
    the same numbers.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        section: TrackingSection,
        run: RunDirectory,
        config: Config,
        note: Callable[[str], None],
    ) -> None:
        self._trackers: list[GeneralTracker] = []
        self._run, self._note = run, note
        if not section.to:
            return
        named = {name: {argument: run.path.name} for name in section.to if (argument := TRACKERS[name].run_name)}
        # accelerate passes wandb a project explicitly, which overrides WANDB_PROJECT; it honours MLflow's variable.
        project = os.environ.get("WANDB_PROJECT") if "wandb" in section.to else None
        try:
            accelerator.init_trackers(project or "finetune", _flat(config.model_dump(mode="json")), named)
        except Exception as error:
            for tracker in accelerator.trackers:  # those that had started
                with contextlib.suppress(Exception):
                    tracker.finish()
            names = ", ".join(section.to)
            raise MachineError(f"`tracking.to: [{names}]` could not start: {first_line(error)}") from error
        self._trackers += accelerator.trackers

    def log(self, split: str, line: dict[str, Any]) -> None:
        """Log the numbers of a line of metrics.jsonl as `split`/name, such as train/loss and eval/loss."""
        numbers = {name: value for name, value in line.items() if type(value) in (int, float) and name != "step"}
        named = {f"{split}/{name.removeprefix('eval_')}": value for name, value in numbers.items()}
        self._each(lambda tracker: tracker.log(named, step=line["step"]))

    def close(self) -> None:
        """Finish the trackers' runs; an open one would receive the metrics of a later run in this process, or block it.

        accelerate's `end_training` would also destroy the process group.
        """
        self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[GeneralTracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # whatever a network or a service makes of it
                self._trackers.remove(tracker)
                self._run.event("tracker_failed", tracker=tracker.name, error=first_line(error))
                self._note(f"{tracker.name} failed and gets no more metrics: {first_line(error)}; training continues")


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The config as flat keys such as `training.learning_rate`, with values that every tracker accepts."""
    return {
        f"{section}.{key}": value if isinstance(value, (bool, int, float, str)) else str(value)
        for section, values in config.items()
        for key, value in values.items()
    }
