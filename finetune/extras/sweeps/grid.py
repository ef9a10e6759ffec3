"""The members of a sweep: every combination of the values that its keys are given."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.choices import load_config
from finetune.config import Config, QuantizationSection
from finetune.config.field_types import shown
from finetune.config.strict_yaml import scalar
from finetune.errors import ConfigError

SEED = "training.seed"
_MOST = 256
_LONGEST = 120  # characters of a name; most file systems take 255 bytes

_NO_LOSS = "it changes no loss"

# Keys that members must have in common, and why: otherwise their losses would say nothing about the setting.
_SHARED = {
    "model.": "members are trained on one base",
    "quantization.": "members are trained on one base",
    "data.": "members are compared on the same rows",
    "preference.": "its values change what the loss means",
    "training.objective": "its values change what the loss means",
    "training.max_steps": "members are compared after the same share of a run of the same length",
    "training.micro_batch": f"{_NO_LOSS}; `finetune fit` chooses it",
    "training.eval_every": _NO_LOSS,
    "training.deterministic": _NO_LOSS,
    "training.epochs": "members are compared after the same share of a run of the same length",
    "training.early_stopping": "the sweep stops members itself",
    "adapter.kind": "members are adapters on one frozen base",
    "adapter.start_from": "members start from one base",
    "memory.": f"{_NO_LOSS}; `finetune fit` chooses it",
    "kernels.": _NO_LOSS,
    "distributed.": _NO_LOSS,
    "tracking.": _NO_LOSS,
    "output.serve": "it decides how the base is held, and members are trained on one",
    "output.runtime": "it decides how the base is held, and members are trained on one",
    "output.way": "it decides how the base is held, and members are trained on one",
    "output.": "each member has a run directory of its own",
}


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its `name`, which is that of its directory, its `setting` without the seed, and what it
    `overrides` in the job.
    """

    name: str
    setting: str
    values: dict[str, Any]
    overrides: list[str]
    config: Config


def members(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str], keys: Mapping[str, Sequence[str]]
) -> list[Member]:
    """Every combination of the values of `keys`, texts as in `section.key=value`, with their configs checked.

    `overrides` are the same for all. The runs are in the job's `output.dir`. Raises ConfigError, naming the cure, for
    keys that members must have in common, and for too few or too many members.
    """
    _check(keys)
    folder = Path(load_config(source, overrides).output.dir or "runs/unnamed")
    # The last part of each key, or the whole key where two have the same.
    last = [key.rpartition(".")[2] for key in keys]
    names = {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}
    made = []
    for values in itertools.product(*keys.values()):
        chosen = dict(zip(keys, values, strict=True))
        name = ",".join(f"{names[key]}={value}" for key, value in chosen.items())
        setting = ",".join(f"{names[key]}={value}" for key, value in chosen.items() if key != SEED)
        # The name without what a path cannot hold, and with a hash of what was lost.
        plain = re.sub(r"[^\w.,=+-]", "_", name, flags=re.ASCII)[:_LONGEST]
        where = folder / (plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}")
        path = json.dumps(str(where), ensure_ascii=False)  # quoted as YAML text
        own = [*(f"{key}={value}" for key, value in chosen.items()), f"output.dir={path}", "output.merge=false"]
        config = load_config(source, [*overrides, *own])
        kept = {key: config.value(key) for key in chosen}
        made.append(Member(where.name, setting or "all seeds", kept, own, config))
    _check_members(made)
    return made


def on_a_cluster(config: Path, arguments: Sequence[str]) -> tuple[list[str], list[str], list[list[str]]]:
    """The overrides that all members have, the swept keys, and each member's own overrides, by which a cluster's tasks
    train it. Raises ConfigError, also for what tasks could not decide alike.
    """
    from finetune.resolve import resolve
    from finetune.training import learning_rate

    overrides, keys = split(arguments)
    made = members(config, overrides, keys)
    for member in made:
        learning_rate.refuse_guess(member.config.training, member.config.optimizer)
        refuse_open_kind(resolve(member.config, until="base").config.quantization)
    return overrides, [f"{key}={','.join(values)}" for key, values in keys.items()], [one.overrides for one in made]


def as_text(value: Any) -> str:
    """A value of Python or numpy as in `section.key=value`. Raises ConfigError for one that YAML cannot say."""
    plain = isinstance(value, str) and re.fullmatch(r"[\w-]+", value) and scalar(value) == value
    try:
        return str(value) if plain else json.dumps(value, default=operator.methodcaller("item"), ensure_ascii=False)
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"{shown(value)} cannot be a value of a config; give numbers, texts, or lists of them"
        ) from None


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides `section.key=value`, and the keys with several values, `section.key=a,b,c`, of a command.

    A comma within brackets, braces or quotes does not separate values.
    """
    overrides, keys = [], {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        key, values = name.strip(), _values(text)
        if equals and len(values) > 1:
            if key in keys:
                raise ConfigError(f"`{key}` is given twice; write all of its values after one `{key}=`")
            keys[key] = values
        else:
            overrides.append(argument)
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in keys:
            raise ConfigError(f"`{key}` is given both as one value and as several; leave out `{override}`")
    return overrides, keys


def _values(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
    return [part.strip() for part in parts]


def _check(keys: Mapping[str, Sequence[str]]) -> None:
    if not keys:
        raise ConfigError("a sweep needs a key with several values, such as training.learning_rate=1e-4,2e-4,4e-4")
    for key, values in keys.items():
        for shared, why in _SHARED.items():
            if key.startswith(shared):
                apart = "" if why.startswith(_NO_LOSS) else ", and make a sweep for each"
                raise ConfigError(f"`{key}` cannot be swept: {why}; set one value{apart}")
        if "" in values:
            raise ConfigError(f"`{key}={','.join(values)}` has an empty value; leave out the comma too many")
        if len(set(values)) < len(values):
            raise ConfigError(
                f"`{key}={','.join(values)}` has a value twice; for another seed, sweep {SEED}=1,2 as well"
            )
        if len(values) < 2:
            raise ConfigError(f"`{key}` has the one value {shown(values[0])}; give several, as in {key}=a,b,c")
    if {*keys} == {SEED}:
        raise ConfigError(f"`{SEED}` alone compares no settings; sweep another key as well, or train the runs alone")
    number = len(list(itertools.product(*keys.values())))
    if number > _MOST:
        raise ConfigError(f"{number:,} members are more than {_MOST}; give fewer values")


def refuse_open_kind(quantization: QuantizationSection) -> None:
    """Raise ConfigError for a member whose kind of quantization is `auto` with all that is known of its base."""
    if quantization.kind == "auto":
        raise ConfigError(
            "`quantization.kind: auto` may choose another base for some members; set the kind that `finetune plan` "
            "names"
        )


def compared_values(config: Config) -> dict[str, dict[str, Any]]:
    """The values of a member's config by section, without its directory."""
    return config.model_dump(mode="json", exclude={"output": {"dir"}})


def refuse_same(made: Sequence[Member], values: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError for two members with the same `values`."""
    first: dict[str, Member] = {}
    for member, own in zip(made, values, strict=True):
        other = first.setdefault(json.dumps(own), member)
        if other is not member:
            raise ConfigError(f"{other.name} and {member.name} are the same job; give other values")


def _check_members(made: Sequence[Member]) -> None:
    configs = [each.config for each in made]
    refuse_same(made, [*map(compared_values, configs)])
    job = configs[0]
    if job.training.max_steps and len({each.training.batch_size for each in configs}) > 1:
        raise ConfigError(
            f"`training.batch_size` with `training.max_steps: {job.training.max_steps}` compares settings that were "
            "trained on different numbers of rows; set training.max_steps=null and training.epochs=1"
        )
    if job.training.objective != "supervised":
        raise ConfigError(
            f"`training.objective: {job.training.objective}`: only sweeps of `supervised` are built, which compare the "
            "loss of trained tokens; train the runs one by one, and put them side by side with `finetune compare`"
        )
    if job.data.eval == "none":
        raise ConfigError("`data.eval: none`: members are compared on evaluation rows; set `auto` or a file")
    if job.adapter.kind != "lora":
        raise ConfigError("`adapter.kind: none` changes the base, which members share; set `lora`")
    if any(each.adapter.init == "pissa" for each in configs):
        raise ConfigError("`adapter.init: pissa` changes the base, which members share; leave it out")
