"""Prints lines, facts, tables and bars, to a terminal or a log, in any encoding.

Lines in a log are never wrapped. Untrusted text is not interpreted as rich markup, cannot control the terminal, and
never fails to encode.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.errors import MachineError
from finetune.report.visible import visible

Cells = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A table as strings: header and rows."""

_BAR_CELLS = 32
_EIGHTHS = "▏▎▍▌▋▊▉"


def put(console: Console, printed: Any, *, whole: bool = False) -> None:
    """Print a rich renderable; `whole` lines are not wrapped in a log. Raises MachineError if writing fails."""
    try:
        console.print(printed, soft_wrap=whole and not console.is_terminal, highlight=False)
    except OSError as error:
        raise MachineError(f"the output could not be written: {error.strerror}") from None


class LastingStream:
    """A stream wrapper that drops its output once writing fails with one of `errors`; `lost` is called then, once, with
    the reason.
    """

    def __init__(
        self, stream: IO[str], lost: Callable[[str], None] = lambda reason: None, errors: type[OSError] = OSError
    ) -> None:
        self._stream, self._lost, self._errors = stream, lost, errors
        self._gone = False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            call()
        except self._errors as error:
            self._gone = True
            discard(self._stream)
            self._lost(error.strerror or str(error))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: IO[str]) -> None:
    """Drop the buffer of a broken stream: Python would flush it again at exit, fail, and exit with code 120."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as nothing:  # not every stream is a file
        os.dup2(nothing.fileno(), stream.fileno())


def text(show: Callable[[Console], object]) -> str:
    """The text that `show` prints to a console."""
    console = Console(file=io.StringIO(), width=shutil.get_terminal_size((120, 24)).columns)
    with console.capture() as captured:
        show(console)
    return captured.get().rstrip("\n")


def say(console: Console, text: str = "", style: str = "", keep: str = "") -> None:
    """Print a line, or a paragraph if `keep` has line breaks (see `visible`)."""
    put(console, plain(console, text, style, keep), whole=True)


def facts(console: Console, rows: dict[str, str]) -> None:
    """Print names and facts, one per line; a terminal wraps a long fact beside its name."""
    width = max(map(len, rows))
    if not console.is_terminal:
        for name, fact in rows.items():
            say(console, f"{name:{width}}  {fact}")
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=10)
    grid.add_column(overflow="fold")
    for name, fact in rows.items():
        grid.add_row(plain(console, name), plain(console, fact))
    put(console, grid)


def table(
    console: Console, head: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[str] = (), **style: Any
) -> None:
    """Print a table (see `drawn`) of untrusted text."""

    def written(cells: Sequence[str]) -> list[Text]:
        return [plain(console, cell) for cell in cells]

    put(console, drawn(written(head), map(written, rows), list(map(str, written(texts))), **style))


def drawn(
    head: Sequence[str | Text], rows: Iterable[Sequence[str | Text]], texts: Sequence[str] = (), *,
    whole_names: bool = False, **style: Any,
) -> Table:  # fmt: skip
    """A table whose first column names the row; columns not in `texts` are numbers, right-aligned.

    Numbers are not folded where the table is too wide, nor with `whole_names` the first column.
    """
    made = Table(**style)
    for number, name in enumerate(head):
        is_text = number == 0 or str(name) in texts
        is_whole = whole_names if number == 0 else not is_text
        made.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=is_whole)
    for row in rows:
        made.add_row(*row)
    return made


def bars(console: Console, rows: Iterable[tuple[str, float, str, str]]) -> None:
    """Print rows of (name, fraction of the longest bar, size, share); a fraction of 0 has no bar.

    Bars are in eighths of a cell, or in whole cells if the console has no such characters.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for name, part, size, share in rows:
        if not part:
            bar = ""
        elif knows_unicode(console):
            full, eighths = divmod(max(1, round(8 * _BAR_CELLS * part)), 8)
            bar = "█" * full + ("", *_EIGHTHS)[eighths]
        else:
            bar = "#" * max(1, round(_BAR_CELLS * part))
        grid.add_row(name, bar, size, share)
    put(console, grid)


def plain(console: Console, text: str, style: str = "", keep: str = "") -> Text:
    """`text` without markup and control characters (see `visible`); ? for characters the console cannot encode."""
    return Text(visible(text, keep).encode(console.encoding, "replace").decode(console.encoding), style=style)


def knows_unicode(console: Console) -> bool:
    """Whether blocks and brackets outside ASCII can be printed."""
    return console.encoding.lower().startswith("utf")
