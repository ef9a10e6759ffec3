"""The provenance of trained weights: everything that determines them, compared between ranks and with a checkpoint.

A change since the checkpoint that affects the trained weights is refused, naming the field. Any other (the length of
the run, how it is monitored, the memory it uses, library versions) is logged. Paths may differ between machines: the
contents of the files are compared instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from finetune.choices import CHOICES
from finetune.config import Config, contradictions, gone_from, ignored_keys
from finetune.config.field_types import source_name
from finetune.data import fingerprint
from finetune.data.prepare import Prepared
from finetune.errors import ArtifactError, ConfigError, DataError, FinetuneError, MachineError
from finetune.model.source import identity
from finetune.resolve import Job
from finetune.resolve.steps import PATHS
from finetune.runtime import ranks
from finetune.storage import checkpoint, records
from finetune.storage.rundir import RunDirectory

Differences = Mapping[str, Mapping[str, tuple[Any, Any]]]
"""For each part of the provenance its values that differ: (before, now), by key."""

MAY_CHANGE = ("training.max_steps", "training.epochs", "training.micro_batch", "training.eval_every",
              "training.early_stopping", "preference.reference", "memory.", "kernels.", "distributed.", "tracking.",
              "output.")  # fmt: skip
"""Settings that may change when a run is resumed: its length, its monitoring, and its use of memory and time."""


class _Refusal(NamedTuple):
    """The error for a part that differs. `changes` in the message are all its values, each by `change`."""

    error: type[FinetuneError]
    message: str
    change: Callable[[str, Any, Any], str] = lambda key, before, now: key


_BETWEEN_RANKS = {
    "config": _Refusal(
        ConfigError,
        "rank {rank} has a different config from rank 0: {changes}",
        lambda key, before, now: f"`{key}` is {now} (rank 0: {before})",
    ),
    "tokenizer": _Refusal(
        ConfigError,
        "rank {rank}: `model.tokenizer`, `data.chat_template` give a different tokenizer or template from rank 0; "
        "give all ranks the same files",
    ),
    "data": _Refusal(
        DataError, "rank {rank}: `data.{key}` has different rows from rank 0; give all ranks the same files"
    ),
    "base": _Refusal(
        ArtifactError,
        "rank {rank}: `model.name` is a different base from rank 0; give all ranks the same files, or set "
        "`model.revision` to a commit",
    ),
    "started_from": _Refusal(
        ConfigError, "rank {rank}: `adapter.start_from` has other weights than on rank 0; give all ranks the same files"
    ),
    "packages": _Refusal(
        MachineError, "rank {rank} has {key} {now}, but rank 0 has {before}; install the same versions for all ranks"
    ),
}
_SINCE_CHECKPOINT = {
    "config": _Refusal(
        ConfigError,
        "{run} was started with a different config: {changes}. {cure} `output.dir`, or use --fresh to start over "
        "(the old run is moved aside)",
        lambda key, before, now: f"{key} ({_shown(before)} → {_shown(now)})",
    ),
    "tokenizer": _Refusal(
        ConfigError,
        "`model.tokenizer`, `data.chat_template`: {run} was started with a different tokenizer or template. Restore "
        "the files, or use --fresh to start over",
    ),
    "data": _Refusal(
        DataError,
        "`data.{key}`: its rows are not those that {run} was started with, so the run cannot continue in the same "
        "order. Restore the files{images}, or use --fresh to start over",
    ),
    "base": _Refusal(
        ConfigError,
        "`model.name`: the files of {base} are not those that {run} was started with. Restore them, set "
        "`model.revision` to the original commit if they come from a hub, or use --fresh to start over",
    ),
}


def of(job: Job, data: Prepared, tokenizer: Any, environment: dict[str, Any]) -> dict[str, Any]:
    """The provenance as JSON values for a checkpoint's manifest; `base` is None until its files are on this machine."""
    splits = {"train": data.train, "eval": data.eval}
    images = {name: fingerprint.of_images(rows) for name, rows in splits.items() if rows and data.media}
    return {
        "config": job.config.model_dump(mode="json"),
        "data": {name: rows and fingerprint.of_rows(rows) for name, rows in splits.items()},
        **({"images": images} if images else {}),
        "tokenizer": fingerprint.of(tokenizer),
        "base": identity.of_base(job.config.model, job.say),
        "processes": ranks.world_size(),
        "packages": environment["packages"],
    }


def refuse_other_ranks(mine: dict[str, Any]) -> None:
    """Raise on all ranks, naming rank and field, if a rank's `mine`, of any parts, differs from rank 0's."""
    ranks.agree(_refuse_other_ranks, mine)


def _refuse_other_ranks(of_ranks: list[dict[str, Any]]) -> None:
    first = _known(of_ranks[0])
    for rank, other in enumerate(of_ranks):
        differences = _differences(first, _known(other))
        if "config" in differences:
            random = first["config"]["model"]["weights"] == "random"  # `model.name` is then no path
            paths = [key for key in PATHS if key != "model.name" or not random]
            differences = {**differences, "config": _without(differences["config"], paths)}
        _refuse(differences, _BETWEEN_RANKS, rank=rank)


def refuse_gone(run: RunDirectory) -> None:
    """Raise ConfigError if `run`, which is to go on, was started with a key or value that this version lacks."""
    for one in gone_from(run.config_file):
        raise ConfigError(
            f"{run.config_file}: `{one.key}`: {one.message}. This run cannot go on without it: finish it with the "
            "version that started it, or use --fresh to start over (the old run is moved aside)"
        )


def refuse_changes(config: Config, run: RunDirectory) -> None:
    """Raise ConfigError naming the keys of `config` that differ from the run's own and would mix two jobs."""
    then, now = run.config().model_dump(), config.model_dump()
    if config.quantization.kind == "published":  # not resolved while a GGUF file is missing, which loading reports
        now["quantization"]["kind"] = then["quantization"]["kind"]
    if config.output.serve and config.output.way == "auto":  # not resolved while the base cannot be loaded
        now["quantization"] = then["quantization"]
    if now["data"]["loss_on"] == "end" and then["training"]["objective"] == now["training"]["objective"]:
        now["data"]["loss_on"] = then["data"]["loss_on"]  # of an earlier version, whose rows say what differs
    differences = _differences({"config": then}, {"config": now})
    harmful = _harmful(differences)
    _refuse(harmful, _SINCE_CHECKPOINT, run=run.path, cure=_cure(config, harmful["config"]))


def _cure(config: Config, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """What to set: to continue a run, where its base alone is held otherwise now, as another way of `output.serve`
    follows (earlier versions knew other obstacles to one); and to start another.
    """
    before = {key: old for key, (old, _) in changes.items() if key.startswith("quantization.")}
    if config.output.serve is None or not before or len(before) < len(changes):
        return "Set another"
    before = {"quantization.kind": config.quantization.kind, **before}
    held = " and ".join(f"`{key}: {str(old).lower()}`" for key, old in before.items())
    if contradictions(config, {**before, "output.way": "rounded"}):
        cure = f"remove `output.serve` and set {held}"
    else:
        cure = f"set `output.way: rounded` and {held}"
    return f"To continue it, {cure}. Otherwise set another"


def changes_since(run: RunDirectory, saved: Any, now: dict[str, Any]) -> dict[str, Any]:
    """Harmless changes since the checkpoint `saved` (a path, or None), as fields of an event.

    `images` has, by split, the numbers of those that were replaced in rows that are otherwise the same. Any other
    change is refused, naming the field. Values unknown to either side are not compared.
    """
    if saved is None:
        return {}
    then = checkpoint.manifest_of(saved)["made_with"]
    if not now.keys() - {"images"} <= then.keys():  # which earlier versions did not save
        raise ArtifactError(f"{saved}: its manifest does not say what it was made with; use --fresh")
    try:
        records.check(then, records.PROVENANCE)
    except ValueError as error:
        raise ArtifactError(f"{saved}: in its manifest, `made_with`: {error}; use --fresh") from None
    differences = _differences(then, _known(now))
    harmful = _harmful(differences)
    if then["base"] and not identity.comparable(then["base"]):
        harmful.pop("base", None)
    # The images that are others in each split that has the same rows but for them.
    before, after = then.get("images", {}), now.get("images", {})
    both = [split for split in harmful.pop("data", {}) if split in before and split in after]
    found = {split: fingerprint.changed_images(before[split], after[split]) for split in both}
    replaced = {split: numbers for split, numbers in found.items() if numbers}
    if others := {key: change for key, change in differences.get("data", {}).items() if key not in replaced}:
        harmful["data"] = others
    images = " (an image may be replaced by another of the same size)" if "images" in now and "images" in then else ""
    _refuse(
        harmful, _SINCE_CHECKPOINT, run=run.path, base=now["config"]["model"]["name"], cure="Set another", images=images
    )
    changes = {part: {key: list(change) for key, change in changed.items()} for part, changed in differences.items()}
    fields: dict[str, Any] = {part: changes[part] for part in ("config", "packages") if part in changes}
    fields |= {part: changes[part][part] for part in ("processes", "base") if part in changes}
    return fields | ({"images": replaced} if replaced else {})


def _known(provenance: dict[str, Any]) -> dict[str, Any]:
    return {part: value for part, value in provenance.items() if part != "base" or value is not None}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, dict[str, tuple[Any, Any]]]:
    """The differing parts among those that both have, in the order of `_BETWEEN_RANKS`."""
    differences = {}
    for part in [part for part in (*_BETWEEN_RANKS, "processes") if part in before and part in now]:
        old, new = (_values(part, each[part]) for each in (before, now))
        if part == "config":
            ignored = ignored_keys(now[part], CHOICES)
            # A key that did not exist in an earlier version counts as unchanged.
            new = {key: value for key, value in new.items() if key in old and key not in ignored}
        if changed := {key: (old.get(key), value) for key, value in new.items() if old.get(key) != value}:
            differences[part] = changed
    return differences


def _values(part: str, value: Any) -> dict[str, Any]:
    """The values of a part by key: a config's by `section.key`, and a single value by the name of the part."""
    if part == "config":
        return {f"{section}.{key}": each for section, keys in value.items() for key, each in keys.items()}
    return value if isinstance(value, dict) else {part: value}


def _harmful(differences: Differences) -> dict[str, Mapping[str, tuple[Any, Any]]]:
    config = differences.get("config", {})
    return {**differences, "config": _without(config, [key for key in config if key.startswith(MAY_CHANGE)])}


def _without(changes: Mapping[str, tuple[Any, Any]], keys: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    return {key: change for key, change in changes.items() if key not in keys}


def _refuse(differences: Differences, refusals: Mapping[str, _Refusal], **names: Any) -> None:
    """Raise the error of the first part that has one and differs."""
    for part, (error, message, change) in refusals.items():
        if changed := differences.get(part):
            key, (before, now) = next(iter(changed.items()))
            changes = ", ".join(change(key, *values) for key, values in changed.items())
            raise error(message.format(key=key, before=before, now=now, changes=changes, **names))


def _shown(value: Any) -> Any:
    return source_name(value) if isinstance(value, str) else value
