"""Resuming a run: whether it is finished, which checkpoint it resumes from, and whether the job is still the same.

A change that affects the trained weights is refused, naming the field. Any other (the length of the run, how it is
monitored, the memory it uses, library versions) is logged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config import AdapterSection, Config, ignored_keys
from finetune.config.field_types import source_name
from finetune.data import fingerprint
from finetune.data.prepare import Prepared
from finetune.errors import ArtifactError, ConfigError, DataError, FinetuneError, MachineError
from finetune.model import build
from finetune.model.adapters import adapter_files
from finetune.model.source import identity
from finetune.runtime import ranks
from finetune.settings import CHOICES
from finetune.storage import checkpoint, records
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training import oom_retry, state

# Settings that may change when a run is resumed: its length, its monitoring, and its use of memory and time.
_MAY_CHANGE = ("training.max_steps", "training.epochs", "training.micro_batch", "training.eval_every",
               "training.early_stopping", "memory.", "kernels.", "distributed.", "tracking.", "output.")  # fmt: skip

# Paths, which may differ between machines; the files' contents are compared. Only rank 0 writes `output.dir`.
_PLACES = ("model.name", "model.tokenizer", "data.train", "data.eval", "data.chat_template", "adapter.start_from",
           "output.dir")  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Where a run resumes: a valid checkpoint, or None. `damaged` are newer checkpoints with their problems."""

    checkpoint: Path | None
    damaged: dict[Path, list[str]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last optimizer step in the checkpoint; -1 without one."""
        return checkpoint_step(self.checkpoint) if self.checkpoint else -1


def to_build(adapter: AdapterSection, *, resumed: bool) -> AdapterSection:
    """The adapter to build: its weights are in the checkpoint if the run is `resumed`, and read from nowhere else."""
    return adapter.model_copy(update={"start_from": None}) if resumed else adapter


def made_with(
    config: Config, data: Prepared, tokenizer: Any, environment: dict[str, Any], note: Callable[[str], None]
) -> dict[str, Any]:
    """Everything that determines the trained weights, as JSON values for a checkpoint's manifest.

    `base` is None until its files are on this machine.
    """
    return {
        "config": config.model_dump(mode="json"),
        "data": {"train": fingerprint.of_rows(data.train), "eval": data.eval and fingerprint.of_rows(data.eval)},
        "tokenizer": fingerprint.of(tokenizer),
        "base": identity.of_base(config.model, note),
        "processes": ranks.world_size(),
        "packages": environment["packages"],
    }


def refuse_other_ranks(mine: dict[str, Any]) -> None:
    """Raise on all ranks, naming rank and field, if a rank's `mine` differs from rank 0's.

    Raises ConfigError, DataError, ArtifactError for another base, or MachineError for other library versions. Unknown
    values (None) and paths are not compared; the contents of the files are.
    """
    ranks.agree(_refuse_other_ranks, mine)


def _refuse_other_ranks(of_ranks: list[dict[str, Any]]) -> None:
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        if "config" in first:
            changes = [
                f"`{change.key}` is {change.now} (rank 0: {change.before})"
                for change in _changes(first["config"], other["config"])
                if change.key not in _places(first["config"])
            ]
            if changes:
                raise ConfigError(f"rank {rank} has a different config from rank 0: {', '.join(changes)}")
        if other.get("tokenizer") != first.get("tokenizer"):
            raise ConfigError(
                f"rank {rank}: `model.tokenizer`, `data.chat_template` give a different tokenizer or template from "
                "rank 0; give all ranks the same files"
            )
        for split in first.get("data", {}):
            if other["data"][split] != first["data"][split]:
                raise DataError(
                    f"rank {rank}: `data.{split}` has different rows from rank 0; give all ranks the same files"
                )
        if first.get("base") and other["base"] and other["base"] != first["base"]:
            raise ArtifactError(
                f"rank {rank}: `model.name` is a different base from rank 0; give all ranks the same files, or set "
                "`model.revision` to a commit"
            )
        if _hash(other) != _hash(first):
            raise ConfigError(
                f"rank {rank}: `adapter.start_from` has other weights than on rank 0; give all ranks the same files"
            )
        for name, version in first.get("packages", {}).items():
            if other["packages"].get(name) != version:
                raise MachineError(
                    f"rank {rank} has {name} {other['packages'].get(name)}, but rank 0 has {version}; install the same "
                    "versions for all ranks"
                )


def _hash(mine: dict[str, Any]) -> str | None:
    """That of the adapter to start from."""
    return (mine.get("started_from") or {}).get("sha256")


def own_places(config: Config, own: Config) -> Config:
    """`config` with the paths of `own`, which may differ between machines."""
    sections = {key: key.split(".") for key in _PLACES}
    return config.changed({key: getattr(getattr(own, name), field) for key, (name, field) in sections.items()})


def _places(config: dict[str, Any]) -> tuple[str, ...]:
    """The keys that are paths; with random weights `model.name` is not one, but names the architecture."""
    return tuple(key for key in _PLACES if key != "model.name" or config["model"]["weights"] != "random")


def is_finished(config: Config, run: RunDirectory, note: Callable[[str], None], *, fresh: bool) -> bool:
    """Whether `run` already has everything that `config` asks for, with a note if so; False with `fresh`.

    Raises ConfigError if the run has another config, ArtifactError for a directory that is not a run.
    """
    return ranks.main_does(lambda: _is_finished(config, run, note, fresh))


def _is_finished(config: Config, run: RunDirectory, note: Callable[[str], None], fresh: bool) -> bool:
    run.check_layout()
    if fresh or not run.has_results:
        return False
    refuse_changes(config, run)
    if not run.finished or _wants_more_steps(config, run):
        return False
    if run.complete_checkpoints() and (wrong := _unlike_trained(config, run)):
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


def _unlike_trained(config: Config, run: RunDirectory) -> str | None:
    """What is wrong with the adapter of a finished run, as earlier versions published some; no weights are read."""
    if config.adapter.kind == "none":
        return None
    try:
        adapter_files.check_files(run.adapter, config.adapter)
        adapter_files.weightless_adapter(build.weightless(config.model), run.adapter, config.adapter)
    except ArtifactError as error:
        return str(error)
    except FinetuneError:  # without its base nothing can be published, and all is well as far as is known
        return None
    return None


def _wants_more_steps(config: Config, run: RunDirectory) -> bool:
    now, then = config.training, run.config().training
    if (now.early_stopping or math.inf) > (then.early_stopping or math.inf):
        return True
    if now.max_steps:  # early stopping may have ended it before its `max_steps`
        return now.max_steps > (then.max_steps or run.steps_done)
    return then.max_steps is not None or now.epochs > then.epochs


def refuse_changes(config: Config, run: RunDirectory) -> None:
    """Raise ConfigError naming the keys of `config` that differ from the run's own and would mix two jobs."""
    _refuse(run, [change for change in _changes(run.config().model_dump(), config.model_dump()) if not change.harmless])


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
    """Where to resume from. Raises ArtifactError if there are checkpoints but none can be used."""
    return Start(*checkpoint.newest_valid(run, state.problems_of))


def compare(run: RunDirectory, start: Start, now: dict[str, Any]) -> dict[str, Any]:
    """Harmless changes since the checkpoint was saved, as fields of an event.

    Raises ConfigError or DataError naming the field for any other change. Values unknown to either side are not
    compared.
    """
    if start.checkpoint is None:
        return {}
    then = checkpoint.manifest_of(start.checkpoint)["made_with"]
    if not now.keys() <= then.keys():
        raise ArtifactError(f"{start.checkpoint}: its manifest does not say what it was made with; use --fresh")
    try:
        records.check(then, records.MADE_WITH)
    except ValueError as error:
        raise ArtifactError(f"{start.checkpoint}: in its manifest, `made_with`: {error}; use --fresh") from None
    changes = list(_changes(then["config"], now["config"]))
    _refuse(run, [change for change in changes if not change.harmless])
    if then["tokenizer"] != now["tokenizer"]:
        raise ConfigError(
            f"`model.tokenizer`, `data.chat_template`: {run.path} was started with a different tokenizer or template. "
            "Restore the files, or use --fresh to start over"
        )
    for split in ("train", "eval"):
        if then["data"][split] != now["data"][split]:
            raise DataError(
                f"`data.{split}`: its rows are not those that {run.path} was started with, so the run cannot continue "
                "in the same order. Restore the files, or use --fresh to start over"
            )
    unknown_base = now["base"] and then["base"] and not identity.comparable(then["base"])
    if now["base"] and then["base"] != now["base"] and not unknown_base:
        raise ConfigError(
            f"`model.name`: the files of {now['config']['model']['name']} are not those that {run.path} was started "
            "with. Restore them or set `model.revision` to the original commit, or use --fresh to start over"
        )
    packages = {
        name: [then["packages"].get(name), version]
        for name, version in now["packages"].items()
        if then["packages"].get(name) != version
    }
    found = {
        "config": {change.key: [change.before, change.now] for change in changes},
        "packages": packages,
        "processes": [then["processes"], now["processes"]] if then["processes"] != now["processes"] else None,
        "base": [then["base"], now["base"]] if unknown_base else None,
    }
    return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class _Change:
    key: str
    before: Any
    now: Any

    @property
    def harmless(self) -> bool:
        return self.key.startswith(_MAY_CHANGE)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[_Change]:
    """The keys whose values differ, except those that have no effect with the chosen settings.

    A key that did not exist in an earlier version counts as unchanged.
    """
    ignored = ignored_keys(now, CHOICES)
    for section, values in now.items():
        for key, value in values.items():
            then = before.get(section, {})
            if key in then and then[key] != value and (path := f"{section}.{key}") not in ignored:
                yield _Change(path, then[key], value)


def _shown(value: Any) -> Any:
    return source_name(value) if isinstance(value, str) else value


def _refuse(run: RunDirectory, changes: list[_Change]) -> None:
    if changes:
        changed = ", ".join(f"{change.key} ({_shown(change.before)} → {_shown(change.now)})" for change in changes)
        raise ConfigError(
            f"{run.path} was started with a different config: {changed}. Set another `output.dir`, or use "
            "--fresh to start over (the old run is moved aside)"
        )
