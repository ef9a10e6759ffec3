"""The command `finetune report`."""

from __future__ import annotations

import functools

import typer

from finetune.cli import options
from finetune.cli.program import command
from finetune.report.visible import visible
from finetune.runtime.stages import stage
from finetune.storage.rundir import RunDirectory


@functools.partial(command, after="launch")
def report(run: options.RunPath) -> None:
    """Redraw the plot and report.html of a run."""
    opened = RunDirectory.open(run)
    stage(f"report of {run}: importing the libraries")
    from finetune.extras.pages.report import write

    typer.echo(visible(str(write(opened, plot=True))))
    if not opened.finished:
        typer.echo(f"{run} is not finished: the report has what there is so far", err=True)
