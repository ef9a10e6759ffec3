"""The command `finetune init`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli import options
from finetune.cli.output import read_or_not
from finetune.cli.program import command
from finetune.report.visible import LINES, visible


@functools.partial(command, after="data")
@read_or_not()
def init(
    model: Annotated[
        str | None, typer.Argument(help="The base: a directory, a GGUF file, a hub name or builtin:tiny-llama.")
    ] = None,
    rows: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="A file, a folder or a data set of the hub.")
    ] = None,
    gpu: options.GpuName = None,
    other: Annotated[
        Path | None, options.file("--from", "Translate this config of Axolotl, LLaMA-Factory or TRL instead.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="What the data's columns hold: prompt=Question,completion=Answer.")
    ] = None,
    output: Annotated[Path | None, options.file("--output", "Where to write the config.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing, take guessed columns, and replace a file that is there.")
    ] = False,
) -> None:
    """Write a first config. It fits the model and the data to the card; what is missing is asked for."""
    from finetune.extras.init import first_config

    first_config.create(
        model, rows, gpu, other, output, columns, yes=yes, say=lambda text: typer.echo(visible(text, LINES))
    )
