"""All tables of choices in one place, and the config checked against them.

Each table stands beside its implementation; this module only collects them, for validation, the schema and the help.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.config import Choices, Config, load
from finetune.config.reference import json_schema, markdown
from finetune.data.formats import FORMATS
from finetune.data.lengths import TOO_LONG
from finetune.model.attention import ATTENTIONS
from finetune.model.quantization import QUANTIZATIONS
from finetune.template import TEMPLATES
from finetune.training.optimizers import OPTIMIZERS
from finetune.training.schedules import SCHEDULES
from finetune.training.tracking import TRACKERS

CHOICES: Choices = {
    "model.attention": {"auto": None, **ATTENTIONS},
    "quantization.kind": QUANTIZATIONS,
    "data.format": FORMATS,
    "data.chat_template": TEMPLATES,
    "data.too_long": TOO_LONG,
    "training.schedule": SCHEDULES,
    "optimizer.kind": OPTIMIZERS,
    "tracking.to": TRACKERS,
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config at `path` with `section.key=value` overrides, checked in full.

    Raises ConfigError with every problem, each with file:line, the nearest valid name and what to do.
    """
    return load(path, overrides, CHOICES)


def schema() -> dict[str, object]:
    """The JSON schema of a config file, for editors."""
    return json_schema(CHOICES)


def reference() -> str:
    """The config reference as Markdown (docs/config.md)."""
    return markdown(CHOICES)
