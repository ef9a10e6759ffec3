"""Diagnoses a machine before a job starts on it, a run directory before it is used, or a model before it is chosen."""

from __future__ import annotations

from finetune import tables


def register() -> None:
    """Add the command `doctor`."""
    tables.extend("finetune.cli", "finetune.extras.doctor.command")
