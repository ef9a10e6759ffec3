"""Makes untrusted text safe for a terminal: it must not move the cursor, change colours or reorder a line.

Text from data files, model configs and library errors reaches a terminal through standard output, which the views
sanitise with `visible`, and through standard error, which `VisibleStream` wraps.
"""

from __future__ import annotations

import unicodedata
from typing import Any, TextIO

# Control characters, format characters (such as direction marks), surrogates, line and paragraph separators.
_WITHOUT_GLYPH = ("Cc", "Cf", "Cs", "Zl", "Zp")

LINES = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Characters to keep in multi-line text: line breaks, tabs, and the (non-)joiners of letters and emoji."""


def visible(text: str, keep: str = "") -> str:
    """`text` with every character without a glyph replaced, except those in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter) in _WITHOUT_GLYPH and letter not in keep else letter
        for letter in text
    )


class VisibleStream:
    """A stream wrapper that applies `visible` to all text, including library warnings and tracebacks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(visible(text, LINES))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
