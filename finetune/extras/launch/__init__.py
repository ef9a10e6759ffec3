"""Files that start a job on several nodes with the standard tool of a cluster."""

from __future__ import annotations

from finetune import tables


def register() -> None:
    """Add the command `launch`."""
    tables.extend("finetune.cli", "finetune.extras.launch.command")
