"""The merged model of a run, rounded with its training rows and kept in the run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config import Config, QuantizationSection, TrainingSection, serving
from finetune.data.prepare import media_of
from finetune.errors import MachineError
from finetune.export.conversion import ExportRequest, exporter_of
from finetune.export.export_formats import FORMATS
from finetune.export.rounding import calibration, memory, part_files
from finetune.export.rounding.layers import LayerRounding
from finetune.model import build
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.model.precision import PRECISIONS
from finetune.model.skeleton import make_buffers
from finetune.model.source import file_hashes
from finetune.model.structure import streamed
from finetune.storage.files import amount, not_written, staged, write_json

RECORD = "rounding.json"

Forms = Callable[[Any, str], Mapping[str, str]]
"""The form of each weight of a model on the meta device that a file of a kind holds quantized."""


def rounded(
    job: ExportRequest, forms: Forms, note: Callable[[str], None]
) -> tuple[dict[str, nn.Parameter], dict[str, Any]]:
    """The packed weights of the run's merged model, by their names in it, and the facts of how they were made.

    What an earlier call with the same model and rows made is taken as it is, and one that was killed is continued.
    Raises ArtifactError, and MachineError for a failed write.
    """
    # The merged model already has what the config changes in a base.
    changed = {"rope_scaling": None, "vocabulary": None, "weights": "pretrained"}
    section = job.config.model.model_copy(update={"name": str(job.run.merged), **changed})
    files = sorted(job.run.merged.glob("*.safetensors"))
    dtype = computed_in(job.config.training, job.device.type)
    architecture = load_architecture(section)
    implementation = build.attention_of_exports(
        job.config.model, architecture, job.device.type, job.config.training.precision
    )
    plain = QuantizationSection(kind="none")
    model = Blueprint(section, plain, architecture, implementation, dtype).weightless()
    media = media_of(job.config.model, job.config.data, job.tokenizer, job.architecture)
    ids = calibration.rows(job.config.data, job.tokenizer, job.config.training.seed, note, media)
    form_of = dict(forms(model, job.kind))
    made_from = {
        "forms": form_of,
        "merged": [file_hashes.sha256(file) for file in files],
        "rows": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "computed_in": str(dtype),
    }
    target = job.run.path / f"rounded-{job.kind}"

    def rounding(folder: Path) -> LayerRounding:
        return LayerRounding(model, streamed.Weights(model, files, dtype), form_of, ids, folder, job.device)

    made = rounding(target)
    if _record(target).get("made_from") != made_from or not made.is_complete:
        try:
            with staged(target, made_from) as folder:
                one = rounding(folder)
                peak = memory.peak_bytes(one.model, one.parts, ids.shape, dtype)
                tokens = f"{ids.numel():,} tokens of the training rows"
                note(f"rounding to {job.kind} with {tokens}, in {amount(peak)} of memory")
                make_buffers(model, job.device)
                one.complete(lambda part: note(f"rounding part {one.parts.index(part) + 1} of {len(one.parts)}"))
                record = {"tokens": ids.numel(), "rows": len(ids), "forecast_bytes": peak, "by_themselves": one.plain()}
                write_json(folder / RECORD, {"made_from": made_from, **record})
        except OSError as error:
            raise MachineError(not_written(target, error)) from None
    facts = {key: value for key, value in _record(target).items() if key != "made_from"}
    return made.packed(), facts


def planned_bytes(config: Config, device_type: str) -> int | None:
    """Peak bytes on the device while a job's merged model is rounded to `output.serve` with enough training rows; None
    if it is not.
    """
    form = FORMATS[serving.export_of(config.output) or "merged"]
    exporter = exporter_of(form) if config.output.way == "rounded" else None
    if not (exporter and exporter.forms):
        return None
    dtype = computed_in(config.training, device_type)
    architecture, plain = load_architecture(config.model, listed=True), QuantizationSection(kind="none")
    model = Blueprint(config.model, plain, architecture, "sdpa", dtype).weightless()
    parts = part_files.parts_of(model, exporter.forms(model, str(config.output.serve)))
    return memory.peak_bytes(model, parts, calibration.shape(config.data.max_length, calibration.TOKENS), dtype)


def computed_in(training: TrainingSection, device_type: str) -> torch.dtype:
    """The type in which layers are run and rounded: a CPU multiplies float32 as fast, and one layer is small."""
    return torch.float32 if device_type == "cpu" else PRECISIONS[training.precision].merged


def _record(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
