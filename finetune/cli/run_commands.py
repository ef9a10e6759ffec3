"""Commands that look at runs, or print the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import finetune
from finetune.cli import options
from finetune.cli.output import give_page, read_or_not
from finetune.cli.program import command
from finetune.runtime.stages import stage


@command
@read_or_not()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more, or that of a sweep.")],
    page: options.Page = None,
    as_json: options.Json = False,
) -> None:
    """Put runs side by side. What differs in their configs, and what came out."""
    stage("compare: importing the libraries")
    give_page(finetune.compare(runs), as_json, page)


@command
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference as Markdown instead.")] = False,
) -> None:
    """Print the JSON schema of a config file."""
    from finetune import choices

    typer.echo(choices.reference().rstrip("\n") if markdown else json.dumps(choices.schema(), indent=2))
