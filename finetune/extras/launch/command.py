"""The command `finetune launch`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli import options
from finetune.cli.program import command
from finetune.errors import ConfigError
from finetune.extras.launch.targets import TARGETS
from finetune.report.visible import LINES, visible


@functools.partial(command, after="eval")
def launch(
    config: options.ConfigFile,
    on: Annotated[str, typer.Option(help=options.listed(TARGETS))] = "",
    overrides: options.Overrides = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of a node, with a process each.")] = 8,
    gpu: Annotated[str | None, typer.Option(help="The card's name for SkyPilot, such as H100.")] = None,
    image: Annotated[str | None, typer.Option(help="A container image that has finetune.")] = None,
    volume: Annotated[str, typer.Option(help="A volume that all nodes can write.")] = "finetune",
    sweep: Annotated[
        bool, typer.Option("--sweep", help="The keys are those of `finetune sweep`: each member is a task.")
    ] = False,
    output: Annotated[Path | None, options.file("--output", "Where to write the file.")] = None,
) -> None:
    """Write the file that starts a job on a cluster. Its standard tool then starts the nodes, and restarts them."""
    from finetune.extras.launch import render

    options.chosen("--on", on, TARGETS)
    given, swept, members = overrides or [], list[str](), list[list[str]]()
    if sweep:
        from finetune.extras.sweeps import grid  # the one thing that an extra knows of another

        given, swept, members = grid.on_a_cluster(config, given)
    try:
        file, submit = render.write(
            config, given, on, nodes=nodes, gpus=gpus, gpu=gpu, image=image, volume=volume, output=output, swept=swept,
            members=members,
        )  # fmt: skip
    except ConfigError as error:
        if several := next((each for each in given if "," in each), ""):
            raise ConfigError(f"{error}; if `{several}` is a list of values to compare, add --sweep") from None
        raise
    typer.echo(visible(f"{file} starts the job: {submit}", LINES))
