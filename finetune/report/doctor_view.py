"""Shows the findings of `finetune doctor`, one per line with its remedy."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from finetune.report import printing

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def show(findings: Iterable[tuple[str, str, str, str]], console: Console) -> None:
    """Print findings, given as (about, status, what, remedy), one per line."""
    rows = list(findings)
    width = max(len(about) for about, *_ in rows)
    for about, status, what, remedy in rows:
        text = "; ".join(what.splitlines()) + (f" → {remedy}" if remedy else "")
        line = printing.plain(console, f"{status:7}  {about:{width}}  {text}")
        line.stylize(_STYLES[status], 0, 7)
        printing.put(console, line, whole=True)
