"""The run directory: the paths and files of a run.

`metrics.jsonl` and `events.jsonl` are append-only. A run is finished when its last event says so; directories written
by a stage (`adapter/`, `merged/`) appear by an atomic rename. Only one process at a time trains in it, and only its
owner can read it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any

from finetune.config import Config, DataSection, dump, load
from finetune.config.field_types import shown
from finetune.errors import ArtifactError, MachineError
from finetune.storage import files, locks, records

SWEEP_TABLE = "sweep.json"
"""The file of a sweep's directory that has the table of its settings; the directories beside it are the runs."""
SWEEP_SCORES = "scores"
"""The folder of a sweep's directory that has what each run was compared by."""

_CHECKPOINT = "step-"


def is_sweep(folder: Path) -> bool:
    """Whether a folder is the directory of a sweep, ended or not."""
    return (folder / SWEEP_TABLE).is_file() or (folder / SWEEP_SCORES).is_dir()


class RunDirectory:
    """Paths and writes below `runs/<name>/`. Creating the object touches nothing on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise ArtifactError(f"expected a run or the path of its folder, not {shown(path)}")
        self.path = Path(os.path.expanduser(path))
        self.config_file = self.path / "config.yaml"
        self.environment_file = self.path / "environment.json"
        self.forecast_file = self.path / "forecast.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.events_file = self.path / "events.jsonl"
        self.data_file = self.path / "data.jsonl"
        self.facts_file = self.path / "data.json"
        self.answers_file = self.path / "answers.json"
        self.eval_file = self.path / "eval.json"
        self.eval_answers_file = self.path / "eval_answers.jsonl"
        self.reference_file = self.path / "reference.bin"
        self.lock_file = self.path / "lock"
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"
        self.merged = self.path / "merged"
        self.plot_file = self.path / "training.png"
        self.report_file = self.path / "report.html"
        self.profile = self.path / "profile"
        self.snapshot_file = self.path / "memory_snapshot.pickle"

    @property
    def quoted(self) -> str:
        """Its path as a word of a command line, and no option, to be copied into a shell."""
        return shlex.quote(f"./{self.path}" if str(self.path).startswith("-") else str(self.path))

    @classmethod
    def open(cls, path: Run) -> RunDirectory:
        """Open a run by its path; a RunDirectory is returned as it is. Raises ArtifactError if there is none."""
        if isinstance(path, RunDirectory):
            return path
        run = cls(path)
        if not os.path.isfile(run.config_file):  # False for an invalid path too
            raise ArtifactError(
                f"{run.path}: not a run directory (no config.yaml); give the folder `finetune train` wrote"
            )
        return run

    def create(self, config: Config) -> None:
        """Create the directory and save the resolved config. Raises MachineError, as `claim` does."""
        self.claim()
        files.write_text(self.config_file, dump(config))

    def claim(self) -> None:
        """Create the directory and mark it as a run. Raises MachineError if it cannot be written, or is of something
        else.
        """
        if not self.events_file.exists() and self.path.is_dir() and any(self.path.iterdir()):
            raise MachineError(f"{self.path}: not empty, and not a run; set `output.dir` to a folder of its own")
        try:
            target = Path(os.path.realpath(self.path))  # the target of a link may not exist yet
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_dir():
                target.mkdir(mode=0o700)
            self.events_file.touch()
        except OSError as error:
            raise MachineError(f"{self.path}: cannot be written: {error.strerror}; set `output.dir`") from None

    def of_rank(self, rank: int) -> RunDirectory:
        """The directory for events and metrics of a rank other than 0. Checkpoints are shared by all ranks."""
        own = RunDirectory(self.path / "processes" / str(rank))
        own.checkpoints = self.checkpoints
        return own

    @property
    def of_ranks(self) -> list[RunDirectory]:
        """The directories that ranks of any start wrote to: this one for rank 0, and one for each other rank."""
        events = (self.path / "processes").glob("*/events.jsonl")
        return [self, *(RunDirectory(file.parent) for file in sorted(events))]

    def data(self, section: DataSection) -> DataSection:
        """`section`, with the chat template saved beside the trained weights, if it is one."""
        for folder in (self.adapter, self.merged):
            file = folder / "chat_template.jinja"
            if file.is_file() and not (folder / "additional_chat_templates").is_dir():
                return section.model_copy(update={"chat_template": str(file)})
        return section

    def config(self) -> Config:
        """The resolved config this run was started with, for comparison; use `choices.config_of` to act on it."""
        return load(self.config_file, trained=True)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from training here; the kernel releases the lock however this process ends."""
        return locks.locked(self.lock_file, str(self.path), "or set another `output.dir`")

    def event(self, name: str, **fields: Any) -> None:
        """Append one line to events.jsonl: what happened, when, and details for people."""
        files.append_line(self.events_file, {"time": round(time.time(), 3), "event": name, **fields})

    def events(self) -> list[dict[str, Any]]:
        """The valid lines of events.jsonl."""
        return records.read_lines(self.events_file, records.EVENT).rows

    def metrics(self) -> list[dict[str, Any]]:
        """The valid lines of metrics.jsonl."""
        return records.read_lines(self.metrics_file, records.METRIC).rows

    def forget_metrics_after(self, step: int) -> None:
        """Drop the metrics of steps that a resume will repeat, so that each step has one line."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        files.write_lines(self.metrics_file, kept)

    def forget_evaluation_at(self, step: int) -> None:
        """Drop the metrics of an evaluation that a resume will repeat."""
        kept = [line for line in self.metrics() if line["step"] != step or "eval_loss" not in line]
        files.write_lines(self.metrics_file, kept)

    @property
    def finished(self) -> bool:
        """Whether the last start of this run completed, including exports and report."""
        ended = False
        for event in self.events():
            ended = event["event"] == "finished" or (ended and event["event"] not in ("started", "resumed"))
        return ended

    @property
    def steps_done(self) -> int:
        """Optimizer steps when training last ended; 0 if it never did."""
        return max((event["step"] for event in self.events() if event["event"] == "trained"), default=0)

    @property
    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints written since the run was last started from scratch."""
        steps: list[int] = []
        for event in self.events():
            if event["event"] == "started":
                steps.clear()
            elif event["event"] == "saved":
                steps.append(event["step"])
        return steps

    @property
    def packed_base(self) -> str | None:
        """SHA-256 of the packed weights that were last trained on; None if there were none."""
        packed = [event.get("sha256") for event in self.events() if event["event"] == "base_packed"]
        return packed[-1] if packed else None

    @property
    def has_results(self) -> bool:
        """Whether the run has results that another start would continue or overwrite."""
        return self.exists and bool(
            self.complete_checkpoints() or self.saved_steps or self.adapter.exists() or self.merged.exists()
        )

    @property
    def exists(self) -> bool:
        """Whether a run was ever started here."""
        return self.events_file.is_file() and self.config_file.is_file()

    def answers(self) -> list[records.SampleAnswer]:
        """The sample questions and their answers, if any. Raises ArtifactError."""
        return records.find(self.answers_file, records.ANSWERS) or []

    def evaluation(self) -> records.EvaluationRecord | None:
        """The results of the last `finetune eval`, if any. Raises ArtifactError."""
        return records.find(self.eval_file, records.EVALUATION)

    def environment(self) -> records.Environment | None:
        """The environment of the last start, if recorded. Raises ArtifactError."""
        return records.find(self.environment_file, records.ENVIRONMENT)

    def data_facts(self) -> records.DataFacts | None:
        """The data in numbers and its first rows, if recorded. Raises ArtifactError."""
        return records.find(self.facts_file, records.DATA)

    def forecast(self) -> records.ForecastRecord | None:
        """The forecast, and at the end what was measured, if there is one. Raises ArtifactError."""
        return records.find(self.forecast_file, records.FORECAST)

    def merge_proof(self) -> records.MergeProof | None:
        """The recorded proof of the merged model, if there is one. Raises ArtifactError."""
        return records.find(self.merged / "merge.json", records.MERGE_PROOF)

    def kept(self, folder: str) -> records.ExportProof | None:
        """What an export in `folder` keeps of the trained model, if it is there. Raises ArtifactError."""
        name = "merge.json" if folder == self.merged.name else "export.json"
        return records.find(self.path / folder / name, records.EXPORT_PROOF)

    @property
    def is_merged(self) -> bool:
        """Whether the merged model was made from the current adapter."""
        return self.merged.exists() and self.is_current("merged")

    def is_current(self, format: str) -> bool:
        """Whether the last export in `format` was made since the last training."""
        made = False
        for event in self.events():
            if event["event"] == "trained":
                made = False
            elif event["event"] in ("merged", "exported"):
                made |= event.get("format", "merged") == format
        return made

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{_CHECKPOINT}{step:08d}"

    def complete_checkpoints(self) -> list[Path]:
        """Published checkpoints, oldest first. Incomplete ones have a suffix."""
        folders = self.checkpoints.glob(f"{_CHECKPOINT}*") if self.checkpoints.is_dir() else []
        return sorted(path for path in folders if path.is_dir() and re.fullmatch(r"step-[0-9]{8,}", path.name))

    def remove_leftovers(self) -> None:
        """Remove what a kill left half-written, and restore what it left half-replaced."""
        for folder in (self.path, self.checkpoints):
            files.remove_leftovers(folder)

    def move_aside(self) -> Path:
        """Rename an earlier run so that a new one can take its name; nothing is deleted. Raises MachineError."""
        path = Path(os.path.realpath(self.path))
        try:
            numbered = (path.with_name(f"{path.name}.{number}") for number in range(1, 10_000))
            aside = next((candidate for candidate in numbered if not os.path.lexists(candidate)), None)
            if aside is None:
                raise OSError(errno.EEXIST, "too many earlier runs beside it")
            path.rename(aside)
        except OSError as error:
            raise MachineError(
                f"{path}: the earlier run cannot be renamed: {error.strerror}; move it yourself, or set another "
                "`output.dir`"
            ) from None
        return aside


def checkpoint_step(path: Path) -> int:
    """The optimizer step a checkpoint directory is named after."""
    return int(path.name.removeprefix(_CHECKPOINT))


Run = RunDirectory | str | os.PathLike[str]
"""A run, or the path of its folder: what functions for Python take."""
