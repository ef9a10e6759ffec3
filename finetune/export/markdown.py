"""Escapes untrusted text for Markdown: on one line, without markup or HTML, and without ending a table's cell."""

from __future__ import annotations

import re


def escaped(text: str) -> str:
    """`text` within a paragraph."""
    return re.sub(r"([\\`*_\[\]<>&|~$#])", r"\\\1", _line(text))


def code(text: str) -> str:
    """`text` as a code span (CommonMark 6.1): its fences are longer than any in the text, which cannot be escaped."""
    text = _line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    # One space is taken off at each end, unless the text is nothing but spaces.
    space = " " if text.strip(" ") and (text[0] in "` " or text[-1] in "` ") else ""
    return f"{fence}{space}{text}{space}{fence}"


def cell(text: str) -> str:
    """`text`, already Markdown, for a cell of a table, which a | ends even within code."""
    return text.replace("|", r"\|")


def _line(text: str) -> str:
    """`text` with line breaks and other unprintable characters replaced."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
