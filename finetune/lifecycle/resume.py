"""Resuming a run: whether it is finished, which checkpoint it resumes from, and with which micro-batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from finetune.config import AdapterSection, Config, ModelSection, TrainingSection
from finetune.errors import ArtifactError, FinetuneError
from finetune.lifecycle import provenance
from finetune.model import build
from finetune.model.adapters import adapter_files
from finetune.model.structure.quantization import with_kind
from finetune.runtime import ranks
from finetune.storage import checkpoint
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training import oom_retry, state

# Keys that keep the values of the run's start where its config leaves them to the program.
_AS_STARTED = ("quantization.kind", "training.precision", "training.learning_rate", "adapter.expert_rank")


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


def is_finished(config: Config, run: RunDirectory, note: Callable[[str], None], *, fresh: bool) -> bool:
    """Whether `run` already has everything that `config` asks for, with a note if so; False with `fresh`."""
    return ranks.main_does(lambda: _is_finished(config, run, note, fresh))


def with_own_kernels(config: Config, run: RunDirectory, note: Callable[[str], None], *, fresh: bool) -> Config:
    """`config`, with the `kernels.fused` that a run to resume was started with unless it names one itself.

    The default was `off` in earlier versions, and kernels round differently: so the run goes on to the same numbers.
    """
    fused = ranks.main_does(lambda: None if fresh or not run.saved_steps else _fused_before(run))
    if fused in (None, config.kernels.fused) or "fused" in config.kernels.model_fields_set:
        return config
    note(f"kernels.fused: {fused}, as this run was started with; set it to change that")
    return config.changed({"kernels.fused": fused})


def _fused_before(run: RunDirectory) -> str:
    then = run.config().kernels
    return then.fused if "fused" in then.model_fields_set else "off"


def _is_finished(config: Config, run: RunDirectory, note: Callable[[str], None], fresh: bool) -> bool:
    if fresh or not run.has_results:
        return False
    goes_on = not run.finished or _wants_more_steps(config.training, run)
    if goes_on:
        provenance.refuse_gone(run)
    provenance.refuse_changes(config, run)
    if goes_on:
        return False
    if run.complete_checkpoints() and (wrong := _unlike_trained(config.model, config.adapter, run)):
        note(f"{wrong}: this is done now")
        return False
    unmerged = config.output.merge and config.adapter.kind == "lora" and not run.merged.exists()
    note(
        f"{run.path} is finished. "
        + (f"To merge it as `output.merge` asks, use `finetune merge {run.quoted}`. " if unmerged else "")
        + f"To continue it, set training.max_steps above its {run.steps_done} steps, or raise "
        "training.epochs; to start over, use --fresh (the old run is moved aside)"
    )
    return True


def as_started(config: Config, run: RunDirectory, *, fresh: bool) -> Config:
    """`config` with the values that `run` was started with for the keys of `_AS_STARTED`, where it says `auto`.

    Runs of versions before `adapter.expert_rank` left experts out of `all-linear`, and had another default rate.
    """
    left = [key for key in _AS_STARTED if config.value(key) == "auto"]
    # Each rank keeps the config of its own, which is compared with the others' afterwards.
    then = ranks.main_does(lambda: None if fresh or not (left and run.has_results) else run.config())
    if then is None:
        return config
    if "quantization.kind" in left:
        config = with_kind(config, then.quantization.kind)
    return config.changed({key: then.value(key) for key in left})


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


def lowered(config: Config, run: RunDirectory) -> dict[str, int]:
    """The keys of a micro-batch smaller than `config`'s, as a rank recorded it when it ran out of memory with these
    settings in an earlier start.
    """
    lowered = {f"training.{key}": value for key, value in config.training.model_dump().items()}
    now = dict(lowered)
    for event in itertools.chain.from_iterable(each.events() for each in run.of_ranks):
        if event["event"] == "micro_batch_lowered" and event.get("settings") == oom_retry.settings(config):
            for key, value in event["lowered"].items():
                lowered[key] = min(value, lowered[key] or math.inf)
    return {key: value for key, value in lowered.items() if value != now[key]}


def find(run: RunDirectory) -> Start:
    """Find the checkpoint to resume from. Raises ArtifactError if there are some but none can be used."""
    return Start(*checkpoint.newest_valid(run, state.problems_of))
