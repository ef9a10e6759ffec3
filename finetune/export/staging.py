"""Publishes an export: written beside its place, proven, described by a record and a model card, then renamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from finetune.errors import MachineError
from finetune.export.card import model_card, public
from finetune.export.finished_run import FinishedRun
from finetune.model.source import identity
from finetune.runtime.environment import describe
from finetune.storage.files import not_written, staged, write_json


def publish(
    finished: FinishedRun, target: Path, make: Callable[[Path], dict[str, Any]], *,
    base_identity: str | None, device: torch.device, record_file: str, written_as: str,
    made_from: dict[str, Any] | None = None, otherwise: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Publish what `make` writes to a folder and proves, in place of `target`; returns the record with the base.

    With `made_from`, an interrupted call with the same values is continued; see `staged`. `written_as` is the form in
    the model card, and `otherwise` ends the message of a failed write. A failure leaves an earlier export untouched.
    """
    model = finished.config.model
    try:
        with staged(target, made_from) as folder:
            record = {
                **make(folder),
                "base": public(model.name),
                "base_sha256": base_identity and base_identity.rpartition(":")[2],
            }
            identity.confirmed(model, base_identity)
            write_json(folder / record_file, {**record, "environment": describe(device)})
            (folder / "README.md").write_text(model_card(finished, record, written_as), encoding="utf-8")
    except (OSError, SafetensorError) as error:  # safetensors 0.8 raises its own error for a full disk
        identity.confirmed(model, base_identity)
        raise MachineError(not_written(target, error) + otherwise) from None
    return record
