"""The command `finetune doctor`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli import options
from finetune.cli.output import give, read_or_not
from finetune.cli.program import command
from finetune.runtime.stages import stage


@functools.partial(command, after="compare")
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
    if not about:
        from finetune.extras.doctor import machine

        examination = machine.examine()
    else:
        from finetune.extras.doctor import model_check
        from finetune.extras.doctor import run_check as run_directory

        if model_check.is_model(about):
            examination = model_check.examine(about, lambda tries: stage(f"doctor of {about}: {tries}"))
        else:
            examination = run_directory.examine(Path(about))
    give(examination, as_json)
    sys.exit(examination.exit_code)
