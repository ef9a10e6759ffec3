"""Commands that start a job elsewhere, look at runs and machines, or print the schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import finetune
from finetune.cli import options
from finetune.cli.output import give, give_page, read_or_not
from finetune.cli.program import command
from finetune.errors import ConfigError
from finetune.extras.launch.targets import TARGETS
from finetune.report.visible import LINES, visible
from finetune.runtime.stages import stage


@command
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
        from finetune.extras.sweeps import grid
        from finetune.resolve import resolve
        from finetune.training import learning_rate

        given, keys = grid.split(given)
        made = grid.members(config, given, keys)
        for member in made:
            learning_rate.refuse_guess(member.config)
            grid.refuse_open_kind(resolve(member.config, until="base").config.quantization)
        members = [member.overrides for member in made]
        swept = [f"{key}={','.join(values)}" for key, values in keys.items()]
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


@command
def report(run: options.RunPath) -> None:
    """Redraw the plot and report.html of a run."""
    opened = finetune.RunDirectory.open(run)
    stage(f"report of {run}: importing the libraries")
    from finetune.report.page import write

    typer.echo(visible(str(write(opened, plot=True))))
    if not opened.finished:
        typer.echo(f"{run} is not finished: the report has what there is so far", err=True)


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
@read_or_not()
def doctor(
    about: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|MODEL]",
            help="What to check instead of the machine: a run directory, or a model by its name, its folder or its "
            "config.json.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check this machine, a run directory, or a model. Says what is wrong and what to do.

    Of a model it reads config.json alone, makes a small copy with random weights, and tries all that is done with one.
    """
    stage(f"doctor of {about or 'this machine'}: importing the libraries")
    from finetune.extras.doctor import machine, model_check
    from finetune.extras.doctor import run_check as run_directory

    if not about:
        examination = machine.examine()
    elif model_check.is_model(about):
        examination = model_check.examine(about, lambda tries: stage(f"doctor of {about}: {tries}"))
    else:
        examination = run_directory.examine(Path(about))
    give(examination, as_json)
    sys.exit(examination.exit_code)


@command
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference as Markdown instead.")] = False,
) -> None:
    """Print the JSON schema of a config file."""
    from finetune import choices

    typer.echo(choices.reference().rstrip("\n") if markdown else json.dumps(choices.schema(), indent=2))
