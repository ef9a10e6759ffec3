"""Diagnoses a machine before a job starts on it, a run directory before it is used, or a model before it is chosen."""

from __future__ import annotations

from finetune import tables


def register() -> None:
    """Add the command `doctor`."""
    tables.extend("finetune.cli", _add_command)


def _add_command() -> None:
    from finetune.extras.doctor import command  # noqa: F401  (which is one by its decorator)
