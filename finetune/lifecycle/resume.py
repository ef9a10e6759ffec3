"""Going on with a run: from which checkpoint, and whether the job is still the same one.

What decides the trained weights must not change on the way: those changes are refused by the name of the field. What
does not (how far the run goes, how it is watched, the memory it takes, library versions) is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config import Config
from finetune.data import fingerprint
from finetune.data.prepare import Prepared
from finetune.errors import ArtifactError, ConfigError, DataError, MachineError
from finetune.model import identity
from finetune.runtime import ranks as processes
from finetune.storage import checkpoint, records
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training import state

# What may change between two starts of a run: how far it goes, how it is watched, and what memory it takes.
_MAY_CHANGE = ("training.max_steps", "training.epochs", "training.micro_batch", "training.eval_every",
               "training.early_stopping", "memory.", "tracking.", "output.")  # fmt: skip

# Where files lie. What is in them is compared by itself, except that of `output.dir`, which the first process writes.
_PLACES = ("model.name", "model.tokenizer", "data.train", "data.eval", "data.chat_template", "output.dir")


@dataclass(frozen=True)
class Start:
    """Where a run goes on: a whole checkpoint, or nothing. `damaged` are the newer ones, with what is wrong."""

    checkpoint: Path | None
    damaged: dict[Path, list[str]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The optimizer step it goes on after; -1 for a run from nothing."""
        return checkpoint_step(self.checkpoint) if self.checkpoint else -1


def made_with(
    config: Config, data: Prepared, tokenizer: Any, environment: dict[str, Any], note: Callable[[str], None]
) -> dict[str, Any]:
    """What a checkpoint remembers of its origin, as JSON values; `base` is None until it is on this machine."""
    return {
        "config": config.model_dump(mode="json"),
        "data": {"train": fingerprint.of_rows(data.train), "eval": data.eval and fingerprint.of_rows(data.eval)},
        "tokenizer": fingerprint.of(tokenizer),
        "base": identity.of_base(config.model, note),
        "processes": processes.count(),
        "packages": environment["packages"],
    }


def refuse_other_ranks(mine: dict[str, Any]) -> None:
    """Raise in all processes, naming rank and field, where one has something else in `mine` than rank 0.

    Raises ConfigError, DataError, ArtifactError for another base, or MachineError for other versions of the libraries.
    What a process does not know (None) is not compared; nor is where files lie, but what is in them.
    """
    processes.agree(_refuse_other_ranks, mine)


def _refuse_other_ranks(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if "config" in first:
            changes = [
                f"`{change.key}` is {change.now} (rank 0: {change.before})"
                for change in _changes(first["config"], other["config"])
                if change.key not in _places(first["config"])
            ]
            if changes:
                raise ConfigError(f"rank {rank} was given another config than rank 0: {', '.join(changes)}")
        if other.get("tokenizer") != first.get("tokenizer"):
            raise ConfigError(
                f"rank {rank}: `model.tokenizer`, `data.chat_template` lead to another tokenizer or template than on "
                "rank 0; give all ranks the same files"
            )
        for split in first.get("data", {}):
            if other["data"][split] != first["data"][split]:
                raise DataError(
                    f"rank {rank}: `data.{split}` has other rows than on rank 0; give all ranks the same files"
                )
        if first.get("base") and other["base"] and other["base"] != first["base"]:
            raise ArtifactError(
                f"rank {rank}: `model.name` leads to another base than on rank 0; give all ranks the same files, or "
                "set `model.revision` to a commit"
            )
        for name, version in first.get("packages", {}).items():
            if other["packages"].get(name) != version:
                raise MachineError(
                    f"rank {rank} has {name} {other['packages'].get(name)}, and rank 0 has {version}; install the same "
                    "versions for all ranks"
                )


def own_places(config: Config, own: Config) -> Config:
    """`config` with the places of files as `own` names them, which may lie elsewhere on another machine."""
    sections = {key: key.split(".") for key in _PLACES}
    return config.changed({key: getattr(getattr(own, name), field) for key, (name, field) in sections.items()})


def _places(config: dict[str, Any]) -> tuple[str, ...]:
    """The keys that say where files lie; random weights have none, and are told by their name."""
    return tuple(key for key in _PLACES if key != "model.name" or config["model"]["weights"] != "random")


def refuse_changes(config: Config, run: RunDirectory) -> None:
    """Raise ConfigError naming the keys in which `config` differs from the run's own, where that would mix two jobs."""
    _refuse(run, [change for change in _changes(run.config().model_dump(), config.model_dump()) if not change.harmless])


def find(run: RunDirectory) -> Start:
    """The newest checkpoint to go on from. Raises ArtifactError where there are some, and none can be used."""
    return Start(*checkpoint.newest_valid(run, state.problems_of))


def compare(run: RunDirectory, start: Start, now: dict[str, Any]) -> dict[str, Any]:
    """What changed since the checkpoint was made and does no harm, as facts for an event.

    Raises ConfigError or DataError naming the field for what does. What either side does not know is not compared.
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
            f"`model.tokenizer`, `data.chat_template`: {run.path} was started with another tokenizer or template; its "
            "files changed. Put them back, or give --fresh to start anew"
        )
    for split in ("train", "eval"):
        if then["data"][split] != now["data"][split]:
            raise DataError(
                f"`data.{split}`: its rows are not those that {run.path} was started with, so it cannot go on in the "
                "same order. Put the files back, or give --fresh to start anew"
            )
    unknown_base = now["base"] and then["base"] and not identity.comparable(then["base"])
    if now["base"] and then["base"] != now["base"] and not unknown_base:
        raise ConfigError(
            f"`model.name`: the files of {now['config']['model']['name']} are not those that {run.path} was started "
            "with. Set `model.revision` to the commit of then or put the files back, or give --fresh to start anew"
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
    """The keys with other values; one that an earlier version did not know has its default, then as now."""
    for section, values in now.items():
        for key, value in values.items():
            then = before.get(section, {})
            if key in then and then[key] != value:
                yield _Change(f"{section}.{key}", then[key], value)


def _refuse(run: RunDirectory, changes: list[_Change]) -> None:
    if changes:
        told = ", ".join(f"{change.key} ({change.before} → {change.now})" for change in changes)
        raise ConfigError(
            f"{run.path} was started with another config: {told}. Set another `output.dir`, or give "
            "--fresh to start anew (the old run is moved aside)"
        )
