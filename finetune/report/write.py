"""Writes the plot and the report of a run."""

from __future__ import annotations

from pathlib import Path

from finetune.report import page
from finetune.storage.rundir import RunDirectory


def write(run: RunDirectory) -> Path:
    """Draw the plot and write the self-contained report of a run, finished or not; return the report's path."""
    from finetune.report import plots  # imports matplotlib, which a run needs at its end

    plots.training(run)
    page.write(run)
    return run.report_file
