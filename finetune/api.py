"""`finetune.train` from Python: a config's sections as arguments, with rows and functions where a file has names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from finetune import recipe
from finetune.config import Config, loaded
from finetune.errors import ConfigError
from finetune.report.result import Result
from finetune.report.terminal import Terminal
from finetune.settings import load_config
from finetune.training import callbacks as checks
from finetune.training.callbacks import Told


def train(
    config: Config | None = None,
    *,
    model: str | PathLike[str] | Mapping[str, Any] | None = None,
    data: str | PathLike[str] | Iterable[Mapping[str, Any]] | Mapping[str, Any] | None = None,
    callbacks: Iterable[Told] | None = None,
    fresh: bool = False,
    terminal: Terminal | None = None,
    **sections: Mapping[str, Any],
) -> Result:
    """Train, export the adapter and return the results; a run that was interrupted goes on from its last checkpoint.

    The job is a `config` from `load_config`, the sections of one as arguments, or both, where an argument's keys
    replace the config's:

        finetune.train(model="Qwen/Qwen3-0.6B", data=rows, training={"max_steps": 100}, output={"dir": "runs/qwen"})

    `model` is a model's name, and `data` rows (a `datasets.Dataset` or dicts) or the name of a source; or each is a
    mapping like the other sections, as `load_config` takes them. Without a `config` both are needed.

    `callbacks` are told of each step, evaluation and checkpoint; a function is called with the metrics of each step and
    evaluation. An exception in one ends the run once the step is saved, and is raised; the same call then goes on from
    there. `fresh` moves an earlier run in the same directory aside instead.

    Raises a FinetuneError for each problem that a user can solve.
    """
    if config is None:
        _refuse_nothing(model=model, data=data)
    else:
        loaded(config)
    told = checks.checked(callbacks)
    if model is not None:
        sections["model"] = model if isinstance(model, Mapping) else {"name": model}
    if data is not None:
        sections["data"] = data if isinstance(data, Mapping) else {"train": data}
    if sections:
        before = config.model_dump() if config else {}
        config = load_config({**before, **{name: _over(before.get(name), keys) for name, keys in sections.items()}})
    return recipe.train(config or Config(), fresh=fresh, terminal=terminal, callbacks=told)


def _refuse_nothing(**given: Any) -> None:
    """Raise ConfigError rather than train the built-in base or rows for a variable that happens to be None."""
    builtin = {"model": Config().model.name, "data": Config().data.train}
    if missing := [name for name, value in given.items() if value is None]:
        raise ConfigError(
            "\n".join(
                f"`{name}` is not given, or None; for the built-in one, {name}={builtin[name]!r}" for name in missing
            )
        )


def _over(before: Mapping[str, Any] | None, keys: Any) -> Any:
    return {**before, **keys} if before and isinstance(keys, Mapping) else keys
