"""An examination on the terminal: a line for each finding, with the remedy below where there is one."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from finetune.report.printing import plain

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def show(findings: Iterable[tuple[str, str, str, str]], console: Console) -> None:
    """(about, status, what, remedy) of each finding; in a log each stays one line, however long."""
    rows = list(findings)
    width = max(len(about) for about, *_ in rows)
    for about, status, what, remedy in rows:
        line = Text(f"{status:7}  ", style=_STYLES[status])
        told = "; ".join(what.splitlines()) + (f" → {remedy}" if remedy else "")
        name = plain(console, f"{about:{width}}  ")  # it may be that of a file, which can hold anything
        name.stylize("default")
        line.append_text(name)
        line.append_text(plain(console, told))
        console.print(line, soft_wrap=not console.is_terminal, highlight=False)
