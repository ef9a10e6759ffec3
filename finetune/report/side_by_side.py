"""Runs side by side: their summaries, and the config keys that differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import as_written, gone_from
from finetune.config.field_types import shown
from finetune.errors import ArtifactError, ConfigError, first_line
from finetune.report.figures import summary
from finetune.report.sweep_table import is_sweep
from finetune.storage.rundir import Run, RunDirectory

# A run's directory says nothing about what it trained.
_NO_DIFFERENCE = "output.dir"


@dataclass(frozen=True)
class SideBySide:
    """Runs by name, read from disk on each access."""

    runs: dict[str, RunDirectory]

    def as_dict(self) -> dict[str, Any]:
        """`runs`: the summary of each (see `Result.summary`); `differences`: config keys, each with a value a run that
        has it; `unread`: what keeps this version from reading the config of a run, which another one wrote.
        """
        configs = self._configs()
        return {
            "runs": {name: summary(run) for name, run in self.runs.items()},
            "differences": _differences({name: config for name, (config, _) in configs.items()}),
            "unread": {name: why for name, (_, why) in configs.items() if why},
        }

    def _configs(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Each run's config, and why this version cannot read it, if it cannot."""
        configs: dict[str, tuple[dict[str, Any], str]] = {}
        for name, run in self.runs.items():
            try:
                configs[name] = run.config().model_dump(mode="json"), ""
                if gone := ", ".join(one.key for one in gone_from(run.config_file)):
                    configs[name] = as_written(run.config_file)[0], f"it has {gone}, unknown here"
            except ConfigError as error:
                values, keys = as_written(run.config_file)
                configs[name] = values, f"it has {', '.join(keys)}, unknown here" if keys else first_line(error)
        return configs


def compare(runs: Sequence[Run]) -> SideBySide:
    """Open runs to compare them; the directory of a sweep stands for its runs.

    Raises ArtifactError for a path without a run, ConfigError for fewer than two runs.
    """
    if isinstance(runs, (str, Path, RunDirectory)) or not isinstance(runs, Iterable):
        raise ConfigError(f"expected a list of runs to compare, not {shown(runs)}")
    opened = [RunDirectory.open(each) for run in runs for each in _members(run)]
    if len({run.path.resolve() for run in opened}) < max(2, len(opened)):
        raise ConfigError("give two run directories or more to compare, each once")
    names = [run.path.name for run in opened]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in opened]
    return SideBySide(dict(zip(names, opened, strict=True)))


def _members(run: Run) -> list[Run]:
    """The runs of a sweep by name, or the run itself."""
    if not isinstance(run, (str, Path)) or not is_sweep(Path(run)):
        return [run]
    runs: list[Run] = [file.parent for file in sorted(Path(run).glob("*/config.yaml"))]
    if not runs:
        raise ArtifactError(f"{run}: no member of this sweep has been trained yet")
    return runs


def _differences(configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The config keys whose values are not the same in all runs, with the value of each run that has the key."""
    values: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        for section, keys in config.items():
            for key, value in keys.items():
                values.setdefault(f"{section}.{key}".rstrip("."), {})[name] = value
    return {
        key: each
        for key, each in values.items()
        if key != _NO_DIFFERENCE
        and (len(each) < len(configs) or any(value != next(iter(each.values())) for value in each.values()))
    }
