"""What `finetune init` must know: the model, the data, the card and the file to write; asked for on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from finetune.data import sources
from finetune.errors import ConfigError, FinetuneError
from finetune.model.locate import locate
from finetune.report.visible import LINES, visible

_MODEL = "Base model: a directory, a hub name such as Qwen/Qwen3-8B, or builtin:tiny-llama"
_DATA = "Data: a file, a folder or a data set of the hub"
_CARD = "Card: a name such as 'RTX 4090', a size such as 24GiB, or cpu"
_HERE = "this machine"


@dataclass(frozen=True)
class Wanted:
    """The answers. `gpu` is None for the device of this machine."""

    model: str
    data: str
    gpu: str | None
    output: Path


def ask(model: str | None, data: str | None, gpu: str | None, output: Path | None, *, yes: bool) -> Wanted:
    """The answers that were not given are asked for on a terminal, unless `yes`.

    Raises ConfigError where one is missing and nobody can be asked, or for a file that would be overwritten;
    ArtifactError or DataError for a model or data that cannot be.
    """
    asks = not yes and sys.stdin.isatty()
    if not asks and not (model and data):
        raise ConfigError(
            "a model and a data file are needed: finetune init MODEL DATA, such as finetune init builtin:tiny-llama "
            "rows.jsonl"
        )
    model = _answer(_MODEL, model, locate)
    data = _answer(_DATA, data, sources.first_row)
    if asks and gpu is None:
        card = str(typer.prompt(_CARD, default=_HERE))
        gpu = None if card == _HERE else card
    output = output or Path(f"{Path(data).name.partition('.')[0] or 'job'}.yaml")
    confirm_replacing(output, yes=yes)
    return Wanted(model, data, gpu, output)


def confirm_replacing(output: Path, *, yes: bool) -> None:
    """Raise ConfigError if `output` exists, unless a person agrees or `yes` says that it is to be replaced."""
    if not output.exists() or yes:
        return
    if not (sys.stdin.isatty() and typer.confirm(visible(f"{output} exists. Replace it?"))):
        raise ConfigError(f"{output} exists and was left as it is; name another file with --output, or add --yes")


def _answer(question: str, given: str | None, check: Callable[[str], object]) -> str:
    """The value given, or one that a person gives and that passes the check."""
    while True:
        value = given or str(typer.prompt(question)).strip()
        try:
            check(value)
            return value
        except FinetuneError as error:
            if given:
                raise
            typer.echo(visible(str(error), LINES), err=True)
