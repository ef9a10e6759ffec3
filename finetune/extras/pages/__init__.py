"""The page of a run, `report.html`: written with the plot at its end, after an evaluation, and while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune import tables

if TYPE_CHECKING:
    from finetune.storage.rundir import RunDirectory


def register() -> None:
    """Add the command `report`, the page's template, and the page to the reports of a run."""
    tables.extend("finetune.cli", "finetune.extras.pages.command")
    tables.extend("finetune.report.view", _add_templates)
    tables.extend("finetune.report.reports", _add_report)


def _add_templates() -> None:
    from finetune.report.view import TEMPLATES

    TEMPLATES.append(__name__)


def _add_report() -> None:
    from finetune.extras.pages.renewal import Renewal
    from finetune.report.reports import RENEWALS, WRITERS

    def write(run: RunDirectory, *, end: bool) -> None:
        from finetune.extras.pages import report

        report.write(run, plot=end)

    WRITERS.append(write)
    RENEWALS.append(Renewal)
