"""The functions of the package that return something to look at: `train`, `plan`, `fit`, `inspect_data` and
`compare`.

Each makes a view of what another folder computes. They import within the function: `compare` needs no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from finetune.choices import load_config
from finetune.config import Config, loaded
from finetune.errors import ConfigError

if TYPE_CHECKING:
    from finetune.forecast.plan import Fitted
    from finetune.report.data_view import DataView
    from finetune.report.forecast_view import PlanView
    from finetune.report.result import Result
    from finetune.report.runs_view import RunsView
    from finetune.report.terminal import Terminal
    from finetune.storage.rundir import Run
    from finetune.training.callbacks import AnyCallback


def train(
    config: Config | None = None,
    *,
    model: str | PathLike[str] | Mapping[str, Any] | None = None,
    data: str | PathLike[str] | Iterable[Mapping[str, Any]] | Mapping[str, Any] | None = None,
    callbacks: Iterable[AnyCallback] | None = None,
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

    `callbacks` are called at each step, evaluation and checkpoint; a function, with the metrics of each step and
    evaluation. An exception in one ends the run once the step is saved, and is raised; the same call then goes on from
    there. `fresh` moves an earlier run in the same directory aside instead.

    Raises a FinetuneError for each problem that a user can solve.
    """
    from finetune import recipe
    from finetune.training import callbacks as checks

    if config is None:
        _refuse_nothing(model=model, data=data)
    else:
        loaded(config)
    checked = checks.checked(callbacks)
    if model is not None:
        sections["model"] = model if isinstance(model, Mapping) else {"name": model}
    if data is not None:
        sections["data"] = data if isinstance(data, Mapping) else {"train": data}
    if sections:
        before = config.model_dump(mode="json", exclude_unset=True) if config else {}
        changed = {
            name: {**before.get(name, {}), **keys} if isinstance(keys, Mapping) else keys
            for name, keys in sections.items()
        }
        config = load_config({**before, **changed})
    return recipe.train(config or Config(), fresh=fresh, terminal=terminal, callbacks=checked)


def plan(config: Config, gpu: str | None = None, gpus: int = 1) -> PlanView:
    """Forecast the job on `gpu`: a GPU's name, a size such as 24GiB, `auto` or `cpu`; by default this machine's device.

    With several `gpus` the forecast is that of one of them. Settings that are `auto` are fitted first. Raises a
    FinetuneError for an unknown model or GPU, or a batch that cannot be divided among that many.
    """
    from finetune.report.forecast_view import PlanView
    from finetune.resolve import planning

    return PlanView(planning.plan(config, gpu, gpus))


def fit(config: Config, gpu: str | None = None, gpus: int = 1) -> Fitted:
    """Fit the job to `gpu`, or to several of that kind: choose the fastest micro-batch and checkpointing, whatever the
    config says, at the same global batch and with the least sharding.

    Micro-batches of all lengths then recompute the same. Raises OutOfMemoryError if nothing fits, ConfigError for a
    batch that `gpus` cannot share.
    """
    from finetune.resolve import planning

    return planning.fit(config, gpu, gpus)


def inspect_data(config: Config) -> DataView:
    """Inspect the data that the job would train on: counts, lengths, padding, and the first rows token by token.

    Raises a FinetuneError for anything the user can fix; DataError also if there is nothing to learn.
    """
    from finetune.data import inspection
    from finetune.model.source import declared
    from finetune.report.data_view import DataView
    from finetune.runtime import libraries

    if declared.leaves_rows_alone(loaded(config)):
        libraries.quiet()
        return DataView(inspection.inspect_data(config, None))
    from finetune.resolve import resolve  # imports torch

    job = resolve(config, until="base")
    return DataView(inspection.inspect_data(job.config, job.architecture))


def compare(runs: Sequence[Run]) -> RunsView:
    """Put runs side by side; a notebook shows the result, and `write(path)` makes a page of it. The directory of a
    sweep stands for its runs.

    Raises ArtifactError for a path without a run, and ConfigError for fewer than two different runs.
    """
    from finetune.report import runs_view

    return runs_view.compare(runs)


def _refuse_nothing(**given: Any) -> None:
    """Raise ConfigError rather than train the built-in base or rows for a variable that happens to be None."""
    builtin = {"model": Config().model.name, "data": Config().data.train}
    if missing := [name for name, value in given.items() if value is None]:
        raise ConfigError(
            "\n".join(
                f"`{name}` is not given, or None; for the built-in one, {name}={builtin[name]!r}" for name in missing
            )
        )
