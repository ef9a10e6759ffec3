"""The config, validated against the tables of choices.

Each table is defined next to its implementation and only collected here, for validation, the schema and the help.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.config import Choices, Config, ModelSection, load
from finetune.config.fields import Help
from finetune.config.reference import json_schema, markdown
from finetune.data.formats import DETECTED, FORMATS
from finetune.data.lengths import TOO_LONG
from finetune.errors import ArtifactError
from finetune.model.attention import ATTENTIONS
from finetune.model.chat_template import TEMPLATES
from finetune.model.quantization import QUANTIZATIONS
from finetune.objectives import OBJECTIVES
from finetune.storage.rundir import RunDirectory
from finetune.training.optimizers import OPTIMIZERS
from finetune.training.schedules import SCHEDULES
from finetune.training.strategies import STRATEGIES
from finetune.training.tracking import TRACKERS

CHOICES: Choices = {
    "model.attention": {"auto": Help("the fastest of the following that works here"), **ATTENTIONS},
    "quantization.kind": QUANTIZATIONS,
    "data.format": {"auto": DETECTED, **FORMATS},
    "data.chat_template": TEMPLATES,
    "data.too_long": TOO_LONG,
    "training.objective": OBJECTIVES,
    "training.schedule": SCHEDULES,
    "optimizer.kind": OPTIMIZERS,
    "distributed.kind": STRATEGIES,
    "tracking.to": TRACKERS,
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config at `path` with `section.key=value` overrides, checked in full.

    Raises ConfigError with every problem, each with file:line, the nearest valid name and what to do; ArtifactError
    for a run's config that asks for foreign code to run, unless an override asks for it too.
    """
    config = load(path, overrides, CHOICES)
    consented = any(override.partition("=")[0].strip() == _TRUST for override in overrides)
    if config.model.trust_remote_code and not consented and _is_of_run(Path(path)):
        raise ArtifactError(_no_consent(Path(path), config.model, f"`{_TRUST}=true` after the config"))
    return config


def config_of(run: RunDirectory, *, trust_remote_code: bool = False) -> Config:
    """The config that `run` was started with, checked in full, for a command that acts on it.

    A run directory may come from someone else: `trust_remote_code` is the user's consent to run the Python code that
    its base ships with. Raises ArtifactError where that is missing, ConfigError as `load_config`.
    """
    config = load(run.config_file, choices=CHOICES, trained=True)
    if config.model.trust_remote_code and not trust_remote_code:
        raise ArtifactError(
            _no_consent(run.config_file, config.model, "`--trust-remote-code` (in Python: `trust_remote_code=True`)")
        )
    return config


_TRUST = "model.trust_remote_code"


def _is_of_run(path: Path) -> bool:
    """Whether a run wrote this config, or has written files beside it."""
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
