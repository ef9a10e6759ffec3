"""A first config, from a model and data or from the config of another tool."""

from __future__ import annotations

from finetune import tables


def register() -> None:
    """Add the command `init`."""
    tables.extend("finetune.cli", _add_command)


def _add_command() -> None:
    from finetune.extras.init import command  # noqa: F401  (which is one by its decorator)
