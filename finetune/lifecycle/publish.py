"""After training: records the results, merges the adapter into its base, and exports both for other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.config import Config
from finetune.data.examples import learnt
from finetune.export import conversion, export_formats, gguf_types, server_commands, upload
from finetune.export import merge as exports
from finetune.forecast import comparison
from finetune.forecast.replay import Forecast
from finetune.lifecycle import failures
from finetune.measure.monitor import Peak
from finetune.model.source.locate import locate
from finetune.report.terminal import Terminal, note_beside_output
from finetune.runtime import libraries
from finetune.runtime.device import this_device
from finetune.runtime.signals import Signals
from finetune.settings import config_of
from finetune.storage.files import write_json
from finetune.storage.rundir import Run, RunDirectory


def record(
    run: RunDirectory, forecast: Forecast | None, peaks: dict[str, Peak], terminal: Terminal, **facts: Any
) -> None:
    """Record the end of training, with `facts` and peak memory by phase, and compare the forecast with the peaks."""
    terminal.answers(run)
    run.event("trained", **facts, memory=peaks)
    if forecast:
        write_json(run.forecast_file, comparison.as_dict(forecast, peaks))
        terminal.compared(comparison.compare(forecast, peaks), forecast.needed_bytes, peaks)


def export_model(
    run: Run,
    format: str,
    *,
    type: str = "f16",
    push: str | None = None,
    trust_remote_code: bool = False,
    terminal: Terminal | None = None,
) -> dict[str, Any]:
    """Write the trained model in a format, for the programs that serve it, once it is proven to be what was trained.

    `format` is a key of `formats.FORMATS`, `type` (of a GGUF file) of `gguf_types.TYPES`; `push` names a
    repository of the hub to upload the folder to. The merged model is made first if a format needs it.
    `trust_remote_code` allows Python code shipped with the run's base.

    Returns the proof, `path`, and `serve`: command lines by program. Raises ArtifactError if the export differs by more
    than the stated bound, or if such code is needed and not allowed; ConfigError for an unknown format or type, and for
    a run that the format cannot express; MachineError while a process trains in the run directory.
    """
    form = export_formats.find(format)
    gguf_types.check(type)
    if push:
        upload.check(push)
    libraries.quiet()
    run = RunDirectory.open(run)
    # Refuses an untrusted run before anything is written there.
    config = config_of(run, trust_remote_code=trust_remote_code)
    terminal = terminal or Terminal()
    with run.locked(), Signals():
        folder = run.path / form.folder
        if form.module:
            with failures.out_of_memory_in_merge(run, format):
                job = conversion.prepare(run, config, form, type, this_device(), note_beside_output)
                if form.merged and config.adapter.kind == "lora" and not run.is_merged:
                    merge_locked(run, config, terminal, note_beside_output)
                record = conversion.convert(job, format, form)
            run.event("exported", format=format, error=record["error"], agreement=record["agreement"])
            terminal.exported(folder, record)
        elif config.adapter.kind == "none":
            record = exports.whole(run, config)
        else:
            record = merge_locked(run, config, terminal, note_beside_output)
    record |= {
        "path": str(folder),
        "serve": server_commands.commands(format, folder, locate(config.model.name), record),
    }
    if prompts := server_commands.prompts(format, learnt(run.events()), config.data.separator):
        record["prompts"] = prompts
    terminal.serves(record["serve"], prompts)
    if push:
        record["pushed"], record["also_there"] = upload.push(folder, push)
        terminal.pushed(record["pushed"], record["also_there"])
    return record


def merge(
    run: Run,
    *,
    onto: str | None = None,
    trust_remote_code: bool = False,
    terminal: Terminal | None = None,
) -> dict[str, Any]:
    """Merge the adapter into its base, and publish the merged model once its logits are proven equal.

    `onto` is a key of `finetune.export.merge.ONTO`: the base as published (the default) or as it was quantized for
    training. `trust_remote_code` allows Python code shipped with the run's base. Returns the comparison. Raises
    ArtifactError if the merged model differs by more than the stated bound, or if such code is needed and not allowed;
    ConfigError for an unknown base or a run without an adapter; MachineError while a process trains in the run
    directory.
    """
    libraries.quiet()
    run = RunDirectory.open(run)
    # Refuses an untrusted run before anything is written there.
    config = config_of(run, trust_remote_code=trust_remote_code)
    with run.locked(), Signals():
        return merge_locked(run, config, terminal or Terminal(), note_beside_output, onto)


def merge_locked(
    run: RunDirectory, config: Config, terminal: Terminal, note: Callable[[str], None], onto: str | None = None
) -> dict[str, Any]:
    """`merge` for a process that already holds the lock."""
    with failures.out_of_memory_in_merge(run, "merged"):
        proof = exports.merge(run, config, this_device(), note, onto)
    run.event("merged", **proof)
    terminal.merged(run.merged, proof)
    return proof
