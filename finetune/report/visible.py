"""Untrusted text on a terminal: nothing in it may move the cursor, recolour the screen or reorder a line.

Text from data files, models' configs and libraries' error messages reaches a terminal in two ways: through `visible`,
with which the views clean what they print on standard output, and through standard error.
"""

from __future__ import annotations

import unicodedata
from typing import Any, TextIO

# Control characters, marks of direction and others without a glyph, halves of surrogate pairs, line separators.
_WITHOUT_GLYPH = ("Cc", "Cf", "Cs", "Zl", "Zp")

LINES = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""What text of several lines may have: breaks, tabs, and what joins letters and emoji or keeps them apart."""


def visible(text: str, keep: str = "") -> str:
    """`text` with a replacement character for each that has no glyph, but for those in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter) in _WITHOUT_GLYPH and letter not in keep else letter
        for letter in text
    )


class VisibleStream:
    """A stream on which only visible text arrives; for the errors, warnings and tracebacks of all code alike."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(visible(text, LINES))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
