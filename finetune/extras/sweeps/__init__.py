"""Sweeps: several settings of one job, trained on one frozen base and compared on the same rows.

grid ─▶ members, each an ordinary run ─▶ running ─▶ halving: which go on ─▶ the table

"""

from __future__ import annotations

from finetune import tables


def register() -> None:
    """Add the command `sweep`, and the template of its page."""
    tables.extend("finetune.cli", "finetune.extras.sweeps.command")
    tables.extend("finetune.report.view", _add_templates)


def _add_templates() -> None:
    from finetune.report.view import TEMPLATES

    TEMPLATES.append(__name__)
