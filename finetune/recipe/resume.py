"""Resuming a run: whether it is finished, and which checkpoint it resumes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from finetune.config import AdapterSection, ModelSection, TrainingSection
from finetune.errors import ArtifactError, FinetuneError
from finetune.model import build
from finetune.model.adapters import adapter_files
from finetune.recipe import provenance
from finetune.resolve import Job
from finetune.runtime import ranks
from finetune.storage import checkpoint
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training import state


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run resumes from, or None; `damaged` has newer checkpoints and their problems."""

    checkpoint: Path | None
    damaged: dict[Path, list[str]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last optimizer step in the checkpoint; -1 without one."""
        return checkpoint_step(self.checkpoint) if self.checkpoint else -1


def to_build(adapter: AdapterSection, *, resumed: bool) -> AdapterSection:
    """The adapter to build: its weights are in the checkpoint if the run is `resumed`, and read from nowhere else."""
    return adapter.model_copy(update={"start_from": None}) if resumed else adapter


def is_finished(job: Job) -> bool:
    """Whether the run's earlier start, if any, left everything that a job asks for, with a note if so.

    Raises ConfigError if that start had another config, or one with keys that this version lacks and it is to go on.
    """
    run = job.earlier
    return ranks.main_does(lambda: run is not None and run.has_results and _is_finished(job, run))


def _is_finished(job: Job, run: RunDirectory) -> bool:
    config = job.config
    goes_on = not run.finished or _wants_more_steps(config.training, run)
    if goes_on:
        provenance.refuse_gone(run)
    provenance.refuse_changes(config, run)
    if goes_on:
        return False
    if run.complete_checkpoints() and (wrong := _unlike_trained(config.model, config.adapter, run)):
        job.say(f"{wrong}: this is done now")
        return False
    unmerged = config.output.merge and config.adapter.kind == "lora" and not run.merged.exists()
    job.say(
        f"{run.path} is finished. "
        + (f"To merge it as `output.merge` asks, use `finetune merge {run.quoted}`. " if unmerged else "")
        + f"To continue it, set training.max_steps above its {run.steps_done} steps, or raise "
        "training.epochs; to start over, use --fresh (the old run is moved aside)"
    )
    return True


def _unlike_trained(model: ModelSection, adapter: AdapterSection, run: RunDirectory) -> str | None:
    """What is wrong with a finished run's adapter, as published by some earlier versions; None if nothing is.

    Reads no weights.
    """
    if adapter.kind == "none":
        return None
    try:
        adapter_files.check_files(run.adapter, adapter)
        adapter_files.weightless_adapter(build.weightless(model), run.adapter, adapter)
    except ArtifactError as error:
        return str(error)
    except FinetuneError:  # without the base it could not be published again
        return None
    return None


def _wants_more_steps(now: TrainingSection, run: RunDirectory) -> bool:
    then = run.config().training
    if (now.early_stopping or math.inf) > (then.early_stopping or math.inf):
        return True
    if now.max_steps:  # early stopping may have ended it before its `max_steps`
        return now.max_steps > (then.max_steps or run.steps_done)
    return then.max_steps is not None or now.epochs > then.epochs


def find(run: RunDirectory) -> Start:
    """Find the checkpoint to resume from. Raises ArtifactError if there are some but none can be used."""
    return Start(*checkpoint.newest_valid(run, state.problems_of))
