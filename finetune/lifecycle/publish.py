"""After training: records the results, and exports the adapter merged into its base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.config import Config
from finetune.export import merge as exports
from finetune.forecast import comparison
from finetune.forecast.replay import Forecast
from finetune.lifecycle import failures
from finetune.measure.monitor import Peak
from finetune.report.terminal import Terminal, note_beside_output
from finetune.runtime import libraries
from finetune.runtime.device import this_device
from finetune.runtime.signals import Signals
from finetune.settings import config_of
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory


def record(
    run: RunDirectory, forecast: Forecast | None, peaks: dict[str, Peak], terminal: Terminal, **facts: Any
) -> None:
    """Record the end of training, with `facts` and peak memory by phase, and compare the forecast with the peaks."""
    terminal.answers(run)
    run.event("trained", **facts, memory=peaks)
    if forecast:
        write_json(run.forecast_file, comparison.as_dict(forecast, peaks))
        terminal.compared(comparison.compare(forecast, peaks))


def merge(
    run: RunDirectory,
    format: str = "merged",
    *,
    onto: str | None = None,
    trust_remote_code: bool = False,
    terminal: Terminal | None = None,
) -> dict[str, Any]:
    """Merge the adapter into its base, and publish it in a format once its logits are proven equal.

    `format` is a key of `finetune.export.formats.FORMATS`, and the name of the folder in the run directory. `onto` is a
    key of `finetune.export.merge.ONTO`: the base as published (the default) or as it was quantized for training.
    `trust_remote_code` allows Python code shipped with the run's base. Returns the comparison. Raises ArtifactError if
    the export differs by more than the stated bound, or if such code is needed and not allowed; ConfigError for an
    unknown format; MachineError while a process trains in the run directory.
    """
    libraries.quiet()
    # Refuses an untrusted run before anything is written there.
    config = config_of(run, trust_remote_code=trust_remote_code)
    with run.locked(), Signals():
        return merge_locked(run, config, terminal or Terminal(), note_beside_output, format, onto)


def merge_locked(
    run: RunDirectory, config: Config, terminal: Terminal, note: Callable[[str], None], format: str = "merged",
    onto: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`merge` for a process that already holds the lock."""
    with failures.out_of_memory_in_merge(run, format):
        proof = exports.merge(run, config, format, this_device(), note, onto)
    run.event("merged", **proof)
    terminal.merged(run.path / format, proof)
    return proof
