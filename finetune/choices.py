"""The config, validated against the tables of choices.

Each table is defined next to its implementation and only collected here, for validation, the schema and the help.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune import objectives
from finetune.config import Choices, Config, ModelSection, Source, from_values, gone_from, load
from finetune.config.field_types import Help, shown
from finetune.config.reference import json_schema, markdown
from finetune.config.serving import RUNTIMES, SERVED, WAYS
from finetune.data import formats, in_memory, sources
from finetune.data.formats import DETECTED, FORMATS
from finetune.data.lengths import TOO_LONG
from finetune.errors import ArtifactError, ConfigError
from finetune.model.attention.backends import ATTENTIONS
from finetune.model.source.chat_template import TEMPLATES
from finetune.model.structure.quantization import QUANTIZATIONS
from finetune.objectives import OBJECTIVES
from finetune.objectives.classification import CLASSIFICATION
from finetune.objectives.distillation import DISTILLATION
from finetune.objectives.kto import LABELLED
from finetune.objectives.preference import PAIRS
from finetune.storage.rundir import RunDirectory
from finetune.training.optimizers import OPTIMIZERS
from finetune.training.schedules import SCHEDULES
from finetune.training.strategies import STRATEGIES
from finetune.training.tracking import TRACKERS

CHOICES: Choices = {
    "model.attention": {"auto": Help("the fastest of the following that works here"), **ATTENTIONS},
    "quantization.kind": QUANTIZATIONS,
    "output.serve": SERVED,
    "output.runtime": RUNTIMES,
    "output.way": WAYS,
    "data.format": {"auto": DETECTED, **FORMATS},
    "data.chat_template": TEMPLATES,
    "data.too_long": TOO_LONG,
    "training.objective": OBJECTIVES,
    "training.schedule": SCHEDULES,
    "optimizer.kind": OPTIMIZERS,
    "distributed.kind": STRATEGIES,
    "tracking.to": TRACKERS,
}


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config in a file or in a mapping of sections, with `section.key=value` overrides, checked in full.

    A mapping may hold Python's own values where a file has names: rows for `data.train` and `data.eval` (a
    `datasets.Dataset` or an iterable of dicts), a function from a row to a row of a known format for `data.format`, and
    a loss or an `Objective` for `training.objective`. The config then has names for them that only this process knows.

    Raises ConfigError with every problem, each with file:line, the nearest valid name and what to do; DataError for
    values that are not rows; ArtifactError for a run's config that asks to run foreign code, unless an override asks
    for it too.
    """
    if isinstance(source, Mapping):
        named = {name: _named(keys) if isinstance(keys, Mapping) else keys for name, keys in source.items()}
        return for_objective(from_values(named, overrides, _choices()))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"config: expected the path of a file or a dict of sections, not {shown(source)}")
    path = Path(source)
    config = for_objective(load(path, overrides, _choices()))
    consented = any(override.partition("=")[0].strip() == _TRUST for override in overrides)
    if config.model.trust_remote_code and not consented and _is_of_run(path):
        raise ArtifactError(_no_consent(path, config.model, f"`{_TRUST}=true` after the config"))
    return config


def for_objective(config: Config) -> Config:
    """`config` with rows read as its objective needs them, and those of preferences dropped if too long.

    Given keys stay.
    """
    objective = OBJECTIVES.get(config.training.objective)
    wanted = _FORMAT_OF.get(objective.layout) if objective else None
    if wanted is None:
        return config
    changes = {"data.format": formats.of_objective(config.data.format, wanted)}
    if objective and objective.layout.scored:
        changes["data.loss_on"] = "end"
    if wanted not in ("labelled", "distilled") and "too_long" not in config.data.model_fields_set:
        changes["data.too_long"] = "drop"
    return config.changed(changes)


_FORMAT_OF = {
    PAIRS: "pairs",
    replace(PAIRS, values=("margin",)): "pairs_with_margin",
    LABELLED: "unpaired",
    CLASSIFICATION.layout: "labelled",
    DISTILLATION.layout: "distilled",
}
"""By the layout of an objective's rows, what `data.format: auto` is."""


def _choices() -> Choices:
    """The tables, with the formats and objectives given from Python so far."""
    return {**CHOICES, "data.format": {**CHOICES["data.format"], **FORMATS}}


def _named(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a section, with names for the rows and functions among their values."""
    return {key: _GIVEN[key](value) if key in _GIVEN else _text(value) for key, value in keys.items()}


def _source(value: Any, key: str) -> Any:
    """One source or several, as `key` takes them in a file, or rows."""
    if isinstance(value, list) and all(map(_is_source, value)):
        return [
            {**one, "source": _source(one["source"], sources.key_of(key, index))}
            if isinstance(one, dict)
            else _text(one)
            for index, one in enumerate(value)
        ]
    rows = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return in_memory.given(value, key) if rows else _text(value)


def _is_source(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) or (
        isinstance(value, dict) and "source" in value and value.keys() <= Source.model_fields.keys()
    )


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_GIVEN: dict[str, Callable[[Any], Any]] = {
    "train": lambda value: _source(value, "data.train"),
    "eval": lambda value: _source(value, "data.eval"),
    "format": lambda value: formats.given(value) if callable(value) else value,
    "objective": lambda value: (
        objectives.given(value) if callable(value) or isinstance(value, objectives.Objective) else value
    ),
}
"""The conversion of values that may be given from Python, by key; no two sections share one of these keys."""


def config_of(run: RunDirectory, *, held_out: str | None = None, trust_remote_code: bool = False) -> Config:
    """The config that `run` was started with, checked in full, for a command that acts on it; with `held_out`, a file,
    as `data.eval`.

    A run directory may come from someone else: `trust_remote_code` is the user's consent to run the Python code that
    its base ships with. Raises ArtifactError where that is missing, or for a run whose weights need what is gone;
    ConfigError as `load_config`.
    """
    config = load(run.config_file, choices=_choices(), trained=True)
    for one in gone_from(run.config_file):
        if one.lost:
            raise ArtifactError(f"{run.config_file}: `{one.key}`: {one.message}; {one.lost}")
    if config.model.trust_remote_code and not trust_remote_code:
        raise ArtifactError(
            _no_consent(run.config_file, config.model, "`--trust-remote-code` (in Python: `trust_remote_code=True`)")
        )
    return config if held_out is None else config.changed({"data.eval": held_out})


_TRUST = "model.trust_remote_code"


def _is_of_run(path: Path) -> bool:
    """Whether this config is in a run directory."""
    runs = [RunDirectory(each.parent) for each in (path, path.resolve())]
    return any(run.events_file.exists() or path.name == run.config_file.name for run in runs)


def _no_consent(file: Path, model: ModelSection, consent: str) -> str:
    return (
        f"{file}: `{_TRUST}` asks to run Python code shipped with `{model.name}` at revision {model.revision}. A run "
        f"directory cannot consent to that for you: read the code, and give {consent} to run it"
    )


def schema() -> dict[str, object]:
    """The JSON schema of a config file, for editors."""
    return json_schema(CHOICES)


def reference() -> str:
    """The config reference as Markdown (docs/config.md)."""
    return markdown(CHOICES)
