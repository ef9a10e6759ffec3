"""Arguments and options that several commands have."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.errors import ConfigError
from finetune.generation.caches import CACHES


def path(text: str) -> Path:
    """Parse the name of a file; a shell leaves the `~` of `--html=~/data.html` to the program."""
    return Path(os.path.expanduser(text))


def file(option: str, help: str) -> Any:
    """An option for a file to write."""
    return typer.Option(option, parser=path, help=help)


def listed(entries: Any) -> str:
    """The names of a table, each with its help."""
    return "; ".join(f"{name}: {entry.help}" for name, entry in entries.items())


def which(model: str) -> str:
    """Parse the name of a run's model."""
    if model not in ("base", "adapter", "merged", "served"):
        raise typer.BadParameter(f"{model!r}: choose base, adapter, merged or served")
    return model


ConfigFile = Annotated[Path, typer.Argument(help="A config, such as job.yaml or builtin:tiny_cpu.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, such as training.max_steps=20.")]
RunPath = Annotated[Path, typer.Argument(help="A run directory, such as runs/tiny_cpu.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the Python code that the run's base ships with, at its revision."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Page = Annotated[Path | None, file("--html", "Also write it as an HTML page.")]
GpuName = Annotated[str | None, typer.Option(help="A card such as 'RTX 4090', a size such as 24GiB, auto or cpu.")]
Gpus = Annotated[int, typer.Option(min=1, max=1024, help="How many of them; the figures are those of one.")]
CacheName = Annotated[str, typer.Option("--cache", help=listed(CACHES))]
Model = Annotated[
    str, typer.Option("--model", parser=which, metavar="NAME", help="base, adapter, merged, or served: as exported.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1)]
System = Annotated[
    str | None, typer.Option(help="The system message; by default the one that all rows of the run share, '' is none.")
]


def made_of(settings: type) -> dict[str, inspect.Parameter]:
    """The fields of a dataclass that have help or limits, as options of a command."""
    hints = typing.get_type_hints(settings) | {"stop": list[str]}  # typer takes no other sequence
    return {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY,
            default=[] if field.default == () else field.default,
            annotation=Annotated[hints[field.name], typer.Option(**field.metadata)],
        )
        for field in dataclasses.fields(settings) if field.metadata
    }  # fmt: skip


def chosen(option: str, name: str, entries: Any) -> None:
    """Raise ConfigError where the option that names an entry of a table is missing; the message lists the entries."""
    if not name:
        raise ConfigError(f"choose with {option}: {listed(entries)}")
