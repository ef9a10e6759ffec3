"""A config in the making: the values that are set, the reason of each, and what a person should know besides."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.choices import CHOICES, for_objective
from finetune.config import Config, explained, written
from finetune.report.visible import visible
from finetune.storage.files import write_text


@dataclass
class Draft:
    """Values and reasons by `section.key`; `title` says what they are for, `notes` what is left to do or know."""

    title: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, key: str, value: Any, reason: str = "") -> None:
        """Set `section.key`, with the reason that stands beside it."""
        self.values[key] = value
        self.reasons |= {key: reason} if reason else {}

    @property
    def config(self) -> Config:
        """These values, and defaults for all others. Raises ValidationError for a value that is not allowed."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return Config.model_validate(sections, context={"choices": CHOICES})

    @property
    def config_as_read(self) -> Config:
        """The config as it is read from the file: with what its objective implies."""
        return for_objective(self.config)

    def text(self) -> str:
        """The config file: title and notes above, and a reason beside each value that has one."""
        lines = [f"# {visible(line)}" for line in (self.title, *self.notes)]
        reasons = {key: visible(why) for key, why in self.reasons.items()}
        sections = self.config.model_dump(exclude_unset=True)  # in the order of the reference
        for name, section in sections.items():
            values = {key: self.values[f"{name}.{key}"] for key in section}
            lines += ["", *explained(written({name: values}), reasons)]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> str:
        """Write the file, and say what was done. Raises MachineError if it cannot be written."""
        text = self.text()
        done = "replaced" if path.exists() else "wrote"
        write_text(path, text)
        config = shlex.quote(str(path))
        return (
            f"{done} {path}:\n\n{text}\nnext: finetune data {config}   # the rows as the model sees them\n"
            f"      finetune train {config}"
        )
