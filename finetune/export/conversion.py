"""Exports that are made from what a run has published: written beside it, proven, and only then renamed into place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from finetune.config import Config
from finetune.data import fingerprint
from finetune.data import prepare as data_prepare
from finetune.errors import MachineError
from finetune.export import proof
from finetune.export.card import model_card, public
from finetune.export.export_formats import Format
from finetune.export.finished_run import Job
from finetune.export.merge import load_merged
from finetune.model.adapters.adapter_files import check_files
from finetune.model.source import identity
from finetune.model.source.tokenizer import load_tokenizer
from finetune.runtime.environment import describe
from finetune.storage.files import not_written, staged, write_json
from finetune.storage.rundir import RunDirectory


def prepare(
    run: RunDirectory, config: Config, form: Format, kind: str, device: torch.device, note: Callable[[str], None]
) -> Job:
    """What the conversion is made from, checked before anything is loaded or written.

    `note` is called if tokenizer or base cannot be verified, or the rows are not here. Raises ConfigError for a run
    that the format cannot express, ArtifactError if adapter, tokenizer or base are missing or others than those of the
    training.
    """
    tokenizer = load_tokenizer(config.model, run.chat_template)
    if config.adapter.kind == "lora":
        check_files(run.adapter, config.adapter)
    trained = run.adapter if config.adapter.kind == "lora" else run.merged
    fingerprint.check(tokenizer, trained)
    base_identity = identity.of_base(config.model, note)
    fingerprint.check_base(config.model, base_identity, trained, note)
    rows, rows_of = data_prepare.compared_rows(config.data, tokenizer, proof.ROWS, proof.ROW_TOKENS, note)

    def merged(dtype: torch.dtype | None) -> Any:
        return load_merged(run, config.model, device, dtype)

    job = Job(run, config, tokenizer, rows, rows_of, device, kind, base_identity, merged)
    _module(form).check(job)
    return job


def convert(job: Job, name: str, form: Format) -> dict[str, Any]:
    """Write and prove the export `name`; returns its export.json.

    Raises ArtifactError if it is not equivalent to the trained model, MachineError if writing fails. A failure leaves
    an earlier export untouched.
    """
    target: Path = job.run.path / form.folder
    try:
        with staged(target) as folder:
            record = {
                "format": name,
                **_module(form).make(job, folder),
                "rows_of": job.rows_of,
                "base": public(job.config.model.name),
                "base_sha256": job.base_identity and job.base_identity.rpartition(":")[2],
            }
            identity.confirmed(job.config.model, job.base_identity)
            write_json(folder / "export.json", {**record, "environment": describe(job.device)})
            card = model_card(job.run, job.config, record, form.help)
            (folder / "README.md").write_text(card, encoding="utf-8")
    except (OSError, SafetensorError) as error:  # safetensors 0.8 raises its own error for a full disk
        identity.confirmed(job.config.model, job.base_identity)
        raise MachineError(not_written(target, error)) from None
    return record


def _module(form: Format) -> Any:
    return importlib.import_module(f"finetune.export.{form.module}")
