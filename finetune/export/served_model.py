"""The model that is served: the weights of a run's newest export with values of its own, as its files have them; or,
without such an export, the base with the adapter that is shipped beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetune.errors import ArtifactError, ConfigError
from finetune.export import compressed_export
from finetune.export.export_formats import FORMATS
from finetune.export.finished_run import FinishedRun
from finetune.export.gguf import gguf_export
from finetune.storage import weight_files
from finetune.storage.rundir import RunDirectory


def newest(run: RunDirectory, way: str) -> str:
    """The format of the newest export with weights of its own; `adapter` if there is none and the adapter was exported,
    or is what `output.way` ships. Raises ConfigError if nothing is served.
    """
    written = [name for name, form in FORMATS.items() if form.merged and form.module and _record(run, name).is_file()]
    if written:
        # By the order of the run's events: times of files change in a copy, and with the clock.
        exported = [event.get("format") for event in run.events() if event["event"] == "exported"]
        return next((name for name in reversed(exported) if name in written), written[0])
    if way == "adapter" or _record(run, "adapter").is_file():
        return "adapter"
    raise ConfigError(
        f"`served`: {run.path} has no export with weights of its own; `finetune export {run.quoted} --to gguf` writes "
        "one"
    )


def load(finished: FinishedRun, name: str, device: torch.device, note: Callable[[str], None]) -> Any:
    """The model in the export `name` of a run, to compute in the type of the merged one; `note` is told its
    folder.

    Raises ConfigError if nothing here reads it, ArtifactError for damaged files.
    """
    run, kind = finished.run, FORMATS[name].kind
    folder = _record(run, name).parent
    note(f"served: {folder}")
    model = finished.load_merged(device)
    if not kind:
        files = [*folder.glob("*.gguf")]
        if len(files) != 1:
            raise ArtifactError(f"{folder} has {len(files)} GGUF files; export again")
        if not gguf_export.is_readable(model.config, files[0].stem.removeprefix("model-")):
            raise ConfigError(f"`served`: only llama.cpp reads {files[0]}; `finetune export` has compared it")
        return gguf_export.load(files[0], model.config, model.dtype, device)

    for file in folder.glob(f"*{weight_files.SUFFIX}"):
        weight_files.check(file)
    stored = compressed_export.read(run.merged, folder, model.config, kind)
    try:
        for own, weight in model.named_parameters():
            weight.data.copy_(stored[own])
    except (KeyError, ValueError, RuntimeError):
        raise ArtifactError(f"{folder} does not have the weights of {run.merged}; export again") from None
    return model


def _record(run: RunDirectory, name: str) -> Path:
    return run.path / FORMATS[name].folder / "export.json"
