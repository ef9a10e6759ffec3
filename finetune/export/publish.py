"""The public functions that merge and export a trained model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from finetune.choices import config_of
from finetune.config import Config, OutputSection, serving
from finetune.config.field_types import pick
from finetune.data import prepare
from finetune.data.examples import learnt
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export import proof, server_commands, staging, upload
from finetune.export.conversion import Conversion, Exporter, ExportRequest, exporter_of
from finetune.export.export_formats import FORMATS
from finetune.export.finished_run import FinishedRun
from finetune.export.gguf import gguf_types
from finetune.export.merging import merge as merging
from finetune.export.rounding import rounded_run
from finetune.model.source.locate import locate
from finetune.report.terminal import Terminal, note_beside_output
from finetune.runtime import libraries
from finetune.runtime.device import this_device
from finetune.runtime.out_of_memory import as_out_of_memory_error
from finetune.runtime.signals import Signals
from finetune.storage.rundir import Run, RunDirectory


def export_model(
    run: Run, format: str, *, type: str | None = None, push: str | None = None, anyway: bool = False,
    rounded: bool = False, trust_remote_code: bool = False, terminal: Terminal | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the trained model in a format, for the programs that serve it, once it is proven to be what was trained.

    `format` is a key of `export_formats.FORMATS`, `type` (of a GGUF file) of `gguf_types.TYPES`, by default what the
    run's `output.serve` names (except with `output.way: adapter`), or f16. `push` names a repository of the hub to
    upload the folder to; an export that keeps less than `proof.LEAST_GAIN` of what training gained is uploaded only
    with `anyway`. The merged model is made first if a format needs it. With `rounded`, and always for what a run with
    `output.way: rounded` serves, weights are rounded with the training rows. `trust_remote_code` allows Python code
    shipped with the run's base.

    Returns the proof, `path`, and `serve`: command lines by program. Raises ArtifactError if the export differs by more
    than the stated bound, or if such code is needed and not allowed; ConfigError for an unknown format or type, and for
    a run that the format cannot express; MachineError while a process trains in the run directory.
    """
    form = pick(FORMATS, format, "export format")
    if type is not None:
        gguf_types.check(type, format)
    if push is not None:
        upload.check(push)
    elif anyway:
        raise ConfigError("`--anyway` is for an upload: name its repository with `--push`")
    libraries.quiet()
    run = RunDirectory.open(run)
    # Refuses an untrusted run before anything is written there.
    config = config_of(run, trust_remote_code=trust_remote_code)
    finished = FinishedRun(run, config)
    kind = form.kind or type or _served_type(config.output)
    exporter = exporter_of(form)
    if rounded:
        if not (exporter and exporter.forms):
            raise ConfigError(f"`--rounded`: nothing is rounded in `{format}`; export a format that is quantized")
        if kind not in serving.GRIDS:
            raise ConfigError(f"`--rounded`: nothing is rounded in `{kind}`; add `--type`, such as `--type q4_k_m`")
    terminal = terminal or Terminal()
    with run.locked(), Signals(), libraries.alone():
        folder = run.path / form.folder
        if exporter:
            record = _converted(finished, format, exporter, kind, terminal, rounded=rounded)
        elif config.adapter.kind == "none":
            record = merging.whole(finished)
        else:
            record = merge_locked(finished, terminal, note_beside_output)
    record |= {
        "path": str(folder),
        "serve": server_commands.commands(
            format, folder, locate(config.model.name), record, scores=config.scorer is not None
        ),
    }
    learned = "chat" if config.scorer else learnt(run.events())  # scores are asked for with the text alone
    if prompts := server_commands.prompts(format, learned, config.data.separator):
        record["prompts"] = prompts
    terminal.serves(record["serve"], prompts)
    if push:
        kept = record.get("gain_kept")
        if kept is not None and kept < proof.LEAST_GAIN and not anyway:
            raise ArtifactError(
                f"{folder} is written, but not pushed to {push}: it keeps {kept:.1%} of what training gained in "
                f"held-out loss, and less than {proof.LEAST_GAIN:.0%} is pushed only when asked twice. Export a form "
                "with more bits, train on the base in this form (`output.serve`), or add `--anyway`"
            )
        record["pushed"], record["also_there"] = upload.push(folder, push)
        terminal.pushed(record["pushed"], record["also_there"])
    return record


def _converted(
    finished: FinishedRun, format: str, exporter: Exporter, kind: str, terminal: Terminal, *, rounded: bool
) -> dict[str, Any]:  # fmt: skip
    """Convert the trained model to a format, merging it first if need be; returns the proof."""
    run, config = finished.run, finished.config
    form, note, device = FORMATS[format], note_beside_output, this_device()
    with _out_of_memory_explained(run, format):
        tokenizer = finished.tokenizer()
        base_identity = finished.base(note)
        media = prepare.media_of(config.model, config.data, tokenizer)
        job = Conversion(
            run=run, config=config, tokenizer=tokenizer, device=device, kind=kind, base_identity=base_identity,
            compared=prepare.compared_rows(config.data, tokenizer, proof.ROWS, proof.ROW_TOKENS, note, media),
            load_merged=lambda dtype: finished.load_merged(device, dtype),
        )  # fmt: skip
        exporter.check(job)  # before anything is loaded or written
        promised = (config.output.way, config.output.serve) == ("rounded", kind)
        rounded = rounded or (promised and exporter.forms is not None)
        of_codes = config.quantization.kind in (*serving.GGUF, "gguf") and form.merged and not rounded
        if of_codes and kind not in ("f16", "bf16"):
            note(
                f"the adapter was trained on a base in served codes, and is merged and rounded again to {kind}, which "
                f"may undo much of what it learned; `finetune export {run.quoted} --to adapter` serves it beside that "
                "base, where nothing is lost"
            )

        if form.merged and config.adapter.kind == "lora" and not run.is_merged:
            merge_locked(finished, terminal, note)
        if rounded and exporter.forms:
            packed, facts = rounded_run.rounded(job, exporter.forms, note)
            job = replace(job, packed=packed, rounded=facts)
        beside: dict[str, Any] = {"rounded": job.rounded} if job.rounded else {}
        # How far the merged model is from the trained one, if they have different bases. Earlier versions did not
        # write the last two keys.
        merged: dict[str, Any] = {**((run.kept("merged") if form.merged else None) or {})}
        if merged.get("onto") == "16-bit" and {"to_trained", "served"} <= merged.keys():
            trained_on = config.quantization.kind
            beside["merged"] = {"trained_on": trained_on, **merged["served"], "gain_kept": merged.get("gain_kept")}
        record = staging.publish(
            finished, run.path / form.folder,
            lambda folder: {"format": format, **exporter.make(job, folder), "rows_of": job.compared.name, **beside},
            base_identity=base_identity, device=device, record_file="export.json", written_as=form.help,
        )  # fmt: skip
    run.event("exported", format=format, error=record["error"], agreement=record["agreement"])
    terminal.exported(run.path / form.folder, record)
    return record


def merge(
    run: Run, *, onto: str | None = None, trust_remote_code: bool = False, terminal: Terminal | None = None
) -> dict[str, Any]:
    """Merge the adapter into its base, and publish the merged model once its logits are proven equal.

    `onto` is a key of `export.merging.bases.ONTO`: the base as published (the default) or as it was quantized for
    training. `trust_remote_code` allows Python code shipped with the run's base. Returns the comparison. Raises
    ArtifactError if the merged model differs by more than the stated bound, or if such code is needed and not allowed;
    ConfigError for an unknown base or a run without an adapter; MachineError while a process trains in the run
    directory.
    """
    libraries.quiet()
    run = RunDirectory.open(run)
    # Refuses an untrusted run before anything is written there.
    finished = FinishedRun(run, config_of(run, trust_remote_code=trust_remote_code))
    with run.locked(), Signals(), libraries.alone():
        return merge_locked(finished, terminal or Terminal(), note_beside_output, onto)


def merge_locked(
    finished: FinishedRun, terminal: Terminal, note: Callable[[str], None], onto: str | None = None
) -> dict[str, Any]:
    """`merge` for a process that already holds the lock."""
    libraries.return_freed_memory()  # such as that of a model that this process has trained
    run = finished.run
    with _out_of_memory_explained(run, "merged"):
        proof = merging.merge(finished, this_device(), note, onto)
    run.event("merged", **proof)
    terminal.merged(run.merged, proof)
    return proof


def _out_of_memory_explained(run: RunDirectory, format: str) -> contextlib.AbstractContextManager[None]:
    """Explain out of memory in a merge or export: training is done, only the export must be repeated."""
    return as_out_of_memory_error(
        "merging",
        f"{run.adapter} is complete and was not touched; `finetune export {run.quoted} --to {format}` exports it on a "
        "machine with more memory, or once some is free",
    )


def _served_type(output: OutputSection) -> str:
    """The type of a GGUF file if none is asked for."""
    return output.serve if output.serve in gguf_types.TYPES and output.way != "adapter" else "f16"


def check_served(run: RunDirectory, config: Config, tokenizer: Any, learns: str) -> None:
    """Raise ConfigError, before training, if the export of what `output.serve` says would be refused.

    `learns` is the kind of example that is trained. What the export needs of its machine does not matter yet.
    """
    form = FORMATS[serving.export_of(config.output) or "merged"]
    if not (exporter := exporter_of(form)):
        return
    kind = form.kind or _served_type(config.output)
    try:
        with contextlib.suppress(MachineError):
            exporter.check(ExportRequest(run, config, tokenizer, this_device(), kind, learns))
    except ConfigError as error:
        of_template = "`output.runtime: llama.cpp`, or " if form is FORMATS["ollama"] else ""
        raise ConfigError(
            f"`output.serve`: what is trained could not be exported: {error}; set {of_template}`output.serve: 16bit` "
            "with `output.runtime: vllm`"
        ) from None
