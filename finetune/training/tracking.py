"""Experiment trackers, which also receive the metrics of the run directory. A new one is one entry in TRACKERS."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config import TrackingSection
from finetune.errors import MachineError, first_line
from finetune.storage.rundir import RunDirectory

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


@dataclass(frozen=True)
class Tracker:
    """One of accelerate's trackers: the package it needs, its argument for the run's name, and its form of tags."""

    help: str
    package: str
    run_name: str | None = None
    tags: Callable[[list[str]], Any] | None = None


_PROJECT = "finetune"

TRACKERS: dict[str, Tracker] = {
    "tensorboard": Tracker("event files in the run directory", "tensorboard"),
    "wandb": Tracker("Weights & Biases", "wandb", "name", list),
    "mlflow": Tracker("MLflow", "mlflow", "run_name", lambda tags: dict.fromkeys(tags, "")),
    "trackio": Tracker("Trackio, local first", "trackio", "name"),
}


def check(section: TrackingSection) -> None:
    """Raise MachineError naming the package to install if a tracker is missing."""
    for name in section.to:
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise MachineError(f"`tracking.to: {name}` needs the package {package}: pip install {package}")


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """accelerate's trackers of `section` for one run, on rank 0 alone; at the end of a block they are closed.

    Raises MachineError if one cannot start. One that fails later is dropped with a note, since the run directory has
    the same numbers.
    """

    def __init__(
        self, section: TrackingSection, run: RunDirectory, config: dict[str, Any], note: Callable[[str], None]
    ) -> None:
        from finetune.runtime import ranks  # imports accelerate, which the table of trackers does not need

        self._trackers: list[GeneralTracker] = []
        self._run, self._note = run, note
        for name in section.to if ranks.is_main() else ():
            try:
                tracker = _made(name, section, run)
                self._trackers.append(tracker)
                tracker.start()
                tracker.store_init_configuration(_flat(config))
            except Exception as error:
                for started in self._trackers:
                    with contextlib.suppress(Exception):
                        started.finish()
                raise MachineError(f"`tracking.to: {name}` could not start: {first_line(error)}") from error

    def log(self, split: str, line: dict[str, Any]) -> None:
        """Log the numbers of a line of metrics.jsonl as `split`/name, such as train/memory/backward/reserved_bytes."""
        named = {f"{split}/{name.removeprefix('eval_')}": value for name, value in _numbers(line) if name != "step"}
        self._each(lambda tracker: tracker.log(named, step=line["step"]))

    def answers(self, run: RunDirectory) -> None:
        """Log the sample answers of `run`, if any: as a table, as a file, or else as text."""
        rows: Sequence[Mapping[str, Any]] = run.answers() if self._trackers else ()
        if not rows:
            return
        columns = ["question", "reference", "before", "after"]

        def log(tracker: Any) -> None:
            if hasattr(tracker, "log_table"):
                data = [[row[column] for column in columns] for row in rows]
                tracker.log_table("answers", columns=columns, data=data)
            elif hasattr(tracker, "log_artifact"):
                tracker.log_artifact(str(run.answers_file))
            else:
                texts = ["\n\n".join(f"{column}: {row[column]}" for column in columns) for row in rows]
                tracker.log({f"answers/{number}": text for number, text in enumerate(texts, start=1)})

        self._each(log)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish the trackers' runs; an open one would receive the metrics of a later run here, or block it."""
        self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[GeneralTracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # whatever a network or a service makes of it
                self._trackers.remove(tracker)
                self._run.event("tracker_failed", tracker=tracker.name, error=first_line(error))
                self._note(f"{tracker.name} failed and gets no more metrics: {first_line(error)}; training continues")


def _made(name: str, section: TrackingSection, run: RunDirectory) -> GeneralTracker:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker: Any = LOGGER_TYPE_TO_CLASS[name]
    entry = TRACKERS[name]
    # accelerate passes wandb a project explicitly, which overrides WANDB_PROJECT; it honours MLflow's variable.
    project = section.project or (os.environ.get("WANDB_PROJECT") if name == "wandb" else None) or _PROJECT
    named: dict[str, Any] = {entry.run_name: section.name or run.path.name} if entry.run_name else {}
    if entry.tags and section.tags:
        named["tags"] = entry.tags(section.tags)
    if tracker.requires_logging_directory:  # a directory of this run alone
        made: GeneralTracker = tracker(_PROJECT, str(run.path / "tensorboard"), **named)
    else:
        made = tracker(project, **named)
    return made


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """The numbers among nested values, with the names of all levels joined by slashes."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            yield prefix + name, value


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The config as flat keys such as `training.learning_rate`, with values that every tracker accepts."""
    return {
        f"{section}.{key}": value if isinstance(value, (bool, int, float, str)) else str(value)
        for section, values in config.items()
        for key, value in values.items()
    }
