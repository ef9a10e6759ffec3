"""The base of all views: a result that is printed, written as JSON or as a page, and shown in a notebook."""

from __future__ import annotations

import base64
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from finetune.report import pages, printing
from finetune.storage.files import write_text


class View:
    """A result for people, on a terminal, as JSON, and with a template in a notebook."""

    template: ClassVar[str] = ""
    """The file in templates/; empty for a view that notebooks show as text."""

    def show(self, console: Console) -> None:
        """Print the view."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """The values for the template."""
        raise NotImplementedError

    def picture(self) -> bytes:
        """A PNG for a notebook, which draws no charts; empty for none."""
        return b""

    def __str__(self) -> str:
        return printing.text(self.show)

    def _repr_html_(self) -> str | None:
        if not self.template:
            return None
        plot = base64.b64encode(self.picture()).decode()
        return pages.fragment(self.template, **self.values(), curves=[], plot=plot)


class PageView(View):
    """A view that is a self-contained HTML page, too."""

    def title(self) -> str:
        """The heading of the page."""
        raise NotImplementedError

    def charts(self) -> list[dict[str, Any]]:
        """The charts of the page, as `charts.js` draws them."""
        return []

    def page(self) -> str:
        """The view as a self-contained HTML document."""
        return pages.page(self.title(), self.template, self.charts(), **self.values(), plot="")

    def write(self, path: str | PathLike[str]) -> None:
        """Write a self-contained HTML page. Raises MachineError if it cannot be written."""
        write_text(Path(path), self.page())
