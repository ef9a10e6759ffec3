"""What commands print: progress while libraries are imported, views, JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer

from finetune.report.visible import LINES, visible
from finetune.runtime import libraries
from finetune.runtime.stages import stage

if TYPE_CHECKING:
    from finetune.config import Config, DataSection
    from finetune.report.terminal import Terminal
    from finetune.report.view import PageView, View
    from finetune.resolve import Job


@contextlib.contextmanager
def importing(doing: str, then: str = "") -> Iterator[None]:
    """Say on a terminal that libraries are imported, which takes seconds, and speed up the imports in the block."""
    stage(f"{doing}: importing the libraries{then}")
    with libraries.importing():
        yield


@contextlib.contextmanager
def read_or_not() -> Iterator[None]:
    """In the block, which writes files, go on where nobody reads the output any more, as behind `| head`."""
    from finetune.report.printing import LastingStream

    with contextlib.redirect_stdout(cast(TextIO, LastingStream(sys.stdout, errors=BrokenPipeError))):
        yield
        sys.stdout.flush()


def new_terminal(*, quiet: bool = False) -> Terminal:
    """A terminal; its module takes long to import."""
    from finetune.report.terminal import Terminal

    return Terminal(quiet=quiet)


def give(view: View, as_json: bool) -> None:
    """Print a view, on the terminal or as JSON."""
    if as_json:
        print_json(view.as_dict())
    else:
        from rich.console import Console

        view.show(Console())


def note(text: str) -> None:
    """Print a note, as a terminal does, whose module imports what a run needs."""
    from rich.console import Console

    from finetune.report import printing

    printing.say(Console(), text, "yellow", keep=LINES)


def give_page(view: PageView, as_json: bool, page: Path | None) -> None:
    """Print a view, and write its page, if one is asked for."""
    give(view, as_json)
    if page:
        view.write(page)
        wrote(page, as_json)


def wrote(path: Path, as_json: bool) -> None:
    """Say that a file was written, on stderr if the output is JSON."""
    typer.echo(visible(f"wrote {path}"), err=as_json)


def announce(title: str, config: Config, gpu: str | None = None) -> Config | Job:
    """Print the job to be forecast, before its libraries take seconds to import; and how it will be served, for which
    its base must be known. The job as far as it was resolved for that.
    """
    from rich.console import Console

    from finetune.report import printing, words

    job: Config | Job = config
    lines: list[str] = []
    if config.output.serve:
        with libraries.importing():
            from finetune.resolve import planning, resolve
        resolved = job = resolve(config, planning.machine_of(config.memory, gpu), until="form")
        config, lines = resolved.config, resolved.notes.get("output.serve", "").splitlines()
    base = words.base(config.model, config.quantization, config.training.precision)
    printing.say(Console(), f"{title}: {base}; adapter: {words.adapter(config.adapter)}")
    for line in lines:
        printing.say(Console(), line)
    return job


def note_rows(section: DataSection) -> None:
    """Note which splits training will read, and the rows that were missing from a forecast; their file may be on the
    machine that will train.
    """
    from finetune.data import sources
    from finetune.report import words

    if splits := words.splits(sources.split_uses(section, fetch=False)):
        note(splits)
    for why in sources.missing(section.train):
        note(f"{why}; without it every row counts as `data.max_length` long")


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
