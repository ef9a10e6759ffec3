"""Ask on a terminal for what `finetune init` must know: model, data, its columns, card, and file to write.

The card comes last, after the data has been read.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import typer

from finetune.data import sources
from finetune.errors import ConfigError, FinetuneError
from finetune.model.source.locate import locate
from finetune.report.visible import LINES, visible
from finetune.storage.files import check_place

_MODEL = "Base model: a directory, a hub name such as Qwen/Qwen3-8B, or builtin:tiny-llama"
_DATA = "Data: a file, a folder or a data set of the hub"
_CARD = "Card: a name such as 'RTX 4090', a size such as 24GiB, or cpu"
_HERE = "this machine"


@dataclass(frozen=True)
class Wanted:
    """The answers. `gpu` is None for the device of this machine; `asks` whether a person can be asked for more."""

    model: str
    data: str
    gpu: str | None
    output: Path
    columns: dict[str, str] = field(default_factory=dict)
    asks: bool = False
    yes: bool = False


def ask(
    model: str | None, data: str | None, gpu: str | None, output: Path | None, columns: str | None = None, *, yes: bool
) -> Wanted:
    """Ask for the answers that were not given, unless `yes`; the card is asked for later.

    Raises ConfigError for a missing answer where nobody can be asked, or for a file that would be overwritten;
    ArtifactError or DataError for an unusable model or data.
    """
    asks = not yes and sys.stdin.isatty()
    if not asks and not (model and data):
        raise ConfigError(
            "a model and a data file are needed: finetune init MODEL DATA, such as finetune init builtin:tiny-llama "
            "rows.jsonl"
        )
    model = _answer(_MODEL, model, locate)
    data = _answer(_DATA, data, lambda name: sources.first_row(name, likely_encoding(name)[0]))
    output = output or Path(f"{Path(data).name.partition('.')[0] or 'job'}.yaml")
    confirm_replacing(output, yes=yes)
    return Wanted(model, data, gpu, output, _columns(columns), asks, yes)


_WINDOWS = "cp1252"


def likely_encoding(data: str) -> tuple[str | None, str]:
    """The likely `data.encoding` of files that are not UTF-8, and a word of theirs to check it by; else None and ""."""
    word = sources.foreign_word(data, _WINDOWS)
    return (_WINDOWS, word) if word else (None, "")


def _columns(text: str | None) -> dict[str, str]:
    """`--columns`, such as `prompt=Question,completion=Answer`, as `data.columns`. Raises ConfigError."""
    pairs = [pair.partition("=") for pair in re.split(r",(?=\w+=)", text or "") if pair]
    if wrong := next((pair for pair in pairs if not all(pair)), None):
        raise ConfigError(
            f"--columns: `{wrong[0]}` is no field and its column; write FIELD=COLUMN, such as "
            "prompt=Question,completion=Answer"
        )
    return {name.strip(): column.strip() for name, _, column in pairs}


def confirm_columns(wanted: Wanted, columns: Mapping[str, str]) -> None:
    """Raise ConfigError unless a person confirms what the names of the columns suggest, or `--yes` does."""
    asking, answering = columns.values()
    if wanted.yes or (wanted.asks and typer.confirm(visible(f"Is `{answering}` the answer to `{asking}`?"))):
        return
    guess = ",".join(f"{name}={column}" for name, column in columns.items())
    raise ConfigError(
        f"{wanted.data}: its columns have names that leave open what is asked and what is answered; name them, such as "
        f"--columns {shlex.quote(guess)}"
    )


def card(wanted: Wanted, check: Callable[[str], object]) -> str | None:
    """The card to fit the job to, asked for on a terminal if it was not given; None for this machine's device."""
    if not wanted.asks or wanted.gpu is not None:
        return wanted.gpu

    def known(name: str) -> None:
        if name != _HERE:
            check(name)

    answer = _answer(_CARD, None, known, default=_HERE)
    return None if answer == _HERE else answer


def confirm_replacing(output: Path, *, yes: bool) -> None:
    """Raise MachineError where no file can be, ConfigError if one is there that neither `yes` nor a person gives up."""
    check_place(output)
    if not output.exists() or yes:
        return
    if not (sys.stdin.isatty() and typer.confirm(visible(f"{output} exists. Replace it?"))):
        raise ConfigError(f"{output} exists and was left as it is; name another file with --output, or add --yes")


def _answer(question: str, given: str | None, check: Callable[[str], object], default: str | None = None) -> str:
    """The value given, or one that a person gives and that passes the check."""
    while True:
        value = given or str(typer.prompt(question, default=default)).strip()
        try:
            check(value)
            return value
        except FinetuneError as error:
            if given:
                raise
            typer.echo(visible(str(error), LINES), err=True)
