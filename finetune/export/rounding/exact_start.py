"""Where training that rounds its weights as they are served starts (`output.way: exact`).

The base is rounded with the training rows as an export with `--rounded` is, but each weight is kept as the position it
is rounded from (`structure.fixed_point`): with the errors of the columns before it made up for, on scales that were
searched with the importance of the rows. Files in the run directory hold these positions, from which training, its
resumption, inference and exports read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from finetune.config import Config, QuantizationSection, TrainingSection
from finetune.data.rows import RowTable
from finetune.errors import ArtifactError, DataError
from finetune.export.rounding import calibration, rounded_run
from finetune.export.rounding.layers import LayerRounding
from finetune.model import build
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.model.source import file_hashes, identity, prequantized
from finetune.model.source.locate import weights_directory
from finetune.model.structure import fixed_point, packed, streamed
from finetune.model.structure.packed_files import digest
from finetune.runtime import libraries
from finetune.storage.files import staged
from finetune.storage.rundir import RunDirectory


def make(
    run: RunDirectory, base: Blueprint, table: RowTable, max_length: int, training: TrainingSection,
    device: torch.device, note: Callable[[str], None],
) -> None:  # fmt: skip
    """Write the packed weights that training on `base` starts from to `run`; `table` has the prepared training rows.

    Writes nothing for a base that is random or published in packed weights, or if all rows show images: training then
    starts from the base's own weights. Raises ArtifactError for a damaged base and MachineError for a failed write.
    """
    if base.model.weights == "random" or prequantized.form(base.architecture):
        return
    files = identity.loaded_files(weights_directory(base.model.name, base.model.revision, download=True))
    if not files:  # refused on loading
        return
    try:
        ids = calibration.ids_of(table, max_length, training.seed)
    except DataError as error:
        note(f"{error}; training starts from the base as it is")
        return
    dtype = rounded_run.computed_in(training, device.type)
    plain = replace(base, quantization=QuantizationSection(kind="none"), dtype=dtype).weightless()
    forms = _forms(base)
    made_from = {
        "forms": forms,
        "base": [file_hashes.sha256(file) for file in files],
        "rows": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "computed_in": str(dtype),
    }

    def rounding(folder: Path) -> LayerRounding:
        return LayerRounding(plain, streamed.Weights(plain, files, base.dtype), forms, ids, folder, device)

    if rounded_run.made_from_of(run.start) != made_from:
        _link(run, made_from)
    rounded_run.kept(run.start, made_from, rounding, f"rounding the base to {base.quantization.kind}", note)
    libraries.return_freed_memory()
    if run.start_sha256 != (made := digest(run.start)):
        run.event("start_kept", sha256=made)


def _link(run: RunDirectory, made_from: dict[str, Any]) -> None:
    """Link the files of a run of this user beside this one, if it starts from the same weights, as in a sweep."""
    for record in sorted(run.path.parent.glob(f"*/{run.start.name}/{rounded_run.RECORD}")):
        folder, other = record.parent, RunDirectory(record.parent.parent)
        if folder.stat().st_uid != run.path.stat().st_uid or rounded_run.made_from_of(folder) != made_from:
            continue
        with contextlib.suppress(ArtifactError, OSError):
            if of_run(other) == folder:
                with staged(run.start) as written:
                    for file in folder.iterdir():
                        os.link(file, written / file.name)
                return


def planned_bytes(config: Config, device_type: str) -> int | None:
    """Peak bytes on the device while the weights that a job starts from are made; None if it starts from the base's
    own.
    """
    architecture = load_architecture(config.model, listed=True)
    if config.model.weights == "random" or prequantized.form(architecture):
        return None
    forms = _forms(build.blueprint(config, architecture, "sdpa"))
    return rounded_run.planned_bytes(config, lambda model, kind: forms, device_type)


def of_run(run: RunDirectory) -> Path | None:
    """The folder of the packed weights that a run started from, or None. Raises ArtifactError if they changed."""
    expected = run.start_sha256
    if expected is None:
        return None
    if digest(run.start) != expected:
        raise ArtifactError(
            f"{run.start}: files are missing or were changed since the run was started, and its adapter was trained on "
            "the weights in them; restore the folder, or train again with `--fresh`"
        )
    return run.start


def _forms(base: Blueprint) -> dict[str, str]:
    """The form of each weight that training moves, and of an untied head unless loading adds rows to it; without
    weights that files store transposed.
    """
    model, forms = base.weightless(), dict[str, str]()
    head, alone = model.get_output_embeddings(), not (model.all_tied_weights_keys or base.model.vocabulary)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            how = packed.packing_of(parameter)
            if how is None or getattr(module, "source_cls", None) is Conv1D:
                continue
            if fixed_point.of(parameter) or (module is head and alone):
                forms[f"{path}.{name}"] = how.form
    return forms
