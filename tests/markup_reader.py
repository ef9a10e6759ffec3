"""Reads a page as a browser would: which elements it has, what they refer to, and whether each is closed."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "img", "wbr"}


class Reader(HTMLParser):
    """Collects tags and references to other resources; every element must be closed."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self._open: list[str] = []
        self.feed(markup)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
