"""The command `finetune sweep`."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli import options
from finetune.cli.output import give_page, importing, new_terminal, read_or_not
from finetune.cli.program import command, refusing
from finetune.errors import ConfigError


@functools.partial(command, after="train")
@read_or_not()
def sweep(
    config: options.ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=A,B,C...", help="Keys to vary, as training.learning_rate=1e-4,2e-4; others have one value."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train every setting to its end.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier sweep aside and start over.")] = False,
    page: options.Page = None,
    as_json: options.Json = False,
) -> None:
    """Train with several values of some keys, on one base. Settings that fall behind are stopped early."""
    with refusing():
        from finetune.extras.sweeps import grid

        check_page(page)
        rest, keys = grid.split(overrides or [])
        grid.members(config, rest, keys)
    with importing(f"sweep of {config}"):
        from finetune.extras.sweeps import running
        from finetune.extras.sweeps.view import SweepView
    table = running.sweep(config, rest, keys, full=full, fresh=fresh, terminal=new_terminal(quiet=as_json))
    give_page(SweepView(table), as_json, page)


def check_page(page: Path | None) -> None:
    """Raise ConfigError, before hours of work, for a page that could not be written at their end."""
    if page and not (page.parent.is_dir() and os.access(page.parent, os.W_OK)):
        raise ConfigError(f"--html {page}: {page.parent} is not a folder that can be written; make it, or give another")
    if page and page.is_dir():
        raise ConfigError(
            f"--html {page}: this is a folder; give the name of a file in it, such as {page / 'sweep.html'}"
        )
