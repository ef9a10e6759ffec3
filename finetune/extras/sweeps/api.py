"""Sweeps from Python: `finetune.sweep`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from finetune.config import Config
from finetune.config.field_types import shown
from finetune.errors import ConfigError
from finetune.extras.sweeps import grid

if TYPE_CHECKING:
    from finetune.extras.sweeps.view import SweepView
    from finetune.report.terminal import Terminal


def sweep(
    config: Config | str | PathLike[str] | Mapping[str, Any],
    keys: Mapping[str, Sequence[Any]],
    *,
    full: bool = False,
    fresh: bool = False,
    terminal: Terminal | None = None,
) -> SweepView:
    """Train a job with every combination of the values of `keys`, such as `{"training.learning_rate": [1e-4, 2e-4]}`,
    on one base in memory, and compare their losses on the evaluation rows.

    Each member is an ordinary run in `output.dir`. Half of the settings are stopped early, again and again, where they
    can be told apart; none with `full`. The same call goes on where one was interrupted; `fresh` moves an earlier sweep
    aside. Values of `training.seed` are averaged. Raises ConfigError for keys that members must share.
    """
    from finetune.extras.sweeps import running
    from finetune.extras.sweeps.view import SweepView

    job = config if isinstance(config, (Config, Mapping)) else fspath(config)
    source = job.model_dump(exclude_unset=True) if isinstance(job, Config) else job
    example = '{"training.learning_rate": [1e-4, 2e-4]}'
    if not isinstance(keys, Mapping):
        raise ConfigError(f"`keys`: give the values of each key, as in {example}, not {shown(keys)}")
    for key, values in keys.items():
        if not isinstance(key, str) or isinstance(values, Mapping):
            raise ConfigError(f"`keys`: {shown(key)} is no whole key; write it as in {example}")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ConfigError(f"`{key}`: give a list of values, not {shown(values)}")
    texts = {key: [*map(grid.as_text, values)] for key, values in keys.items()}
    return SweepView(running.sweep(source, [], texts, full=full, fresh=fresh, terminal=terminal))
