"""How the views print: facts, tables and bars, on a terminal as in a log, whatever the console can encode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.report.visible import visible

_BAR_CELLS = 32
_EIGHTHS = "▏▎▍▌▋▊▉"


def say(console: Console, told: str, style: str = "") -> None:
    """A line; in a log it stays whole, however long."""
    console.print(plain(console, told), style=style, soft_wrap=not console.is_terminal, highlight=False)


def facts(console: Console, told: dict[str, str]) -> None:
    """Names and facts, a line each."""
    width = max(map(len, told))
    for name, fact in told.items():
        say(console, f"{name:{width}}  {fact}")


def table(
    console: Console,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: Sequence[str] = (),
) -> None:
    """A table whose first column names the row; the columns that are no `texts` are numbers and align to the right."""
    drawn = Table()
    for number, name in enumerate(head):
        is_text = number == 0 or name in texts
        drawn.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        drawn.add_row(*(plain(console, cell) for cell in row))
    console.print(drawn, highlight=False)


def bars(console: Console, rows: Iterable[tuple[str, float, str, str]]) -> None:
    """(name, part of the longest bar, size, share) in each row; a part of 0 has no bar."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for name, part, size, share in rows:
        grid.add_row(name, _bar(console, part) if part else "", size, share)
    console.print(grid, highlight=False)


def plain(console: Console, told: str) -> Text:
    """`told` as it is: no markup is read in it, no control character kept, and the console can encode it."""
    return Text(encodable(console, visible(told)))


def encodable(console: Console, told: str) -> str:
    """`told` with a question mark for each character that the console has no code for."""
    return told.encode(console.encoding, "replace").decode(console.encoding)


def knows_unicode(console: Console) -> bool:
    """Whether blocks and brackets outside ASCII can be printed."""
    return console.encoding.lower().startswith("utf")


def _bar(console: Console, part: float) -> str:
    """A bar in eighths of a cell; in whole ones where the console has no such characters."""
    if not knows_unicode(console):
        return "#" * max(1, round(_BAR_CELLS * part))
    full, eighths = divmod(max(1, round(8 * _BAR_CELLS * part)), 8)
    return "█" * full + ("", *_EIGHTHS)[eighths]
