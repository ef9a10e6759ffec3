"""Text of others in Markdown: it stays text, on one line, and is no markup, HTML or end of a table's cell."""

from __future__ import annotations

import re


def escaped(text: str) -> str:
    """A text between others."""
    return re.sub(r"([\\`*_\[\]<>&|~$#])", r"\\\1", _line(text))


def code(text: str) -> str:
    """A text as a code span, in which there are no escapes: longer fences than any in it, as in CommonMark 6.1."""
    text = _line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    # One space is taken off at each end, unless the text is nothing but spaces.
    space = " " if text.strip(" ") and (text[0] in "` " or text[-1] in "` ") else ""
    return f"{fence}{space}{text}{space}{fence}"


def cell(text: str) -> str:
    """What is Markdown by itself, in a cell of a table: a | ends the cell, even within code."""
    return text.replace("|", r"\|")


def _line(text: str) -> str:
    """A text without line breaks and other characters that have no glyph."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
