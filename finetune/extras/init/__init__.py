"""A first config, from a model and data or from the config of another tool."""

from __future__ import annotations

from finetune import tables


def register() -> None:
    """Add the command `init`."""
    tables.extend("finetune.cli", "finetune.extras.init.command")
