"""The base of all views: a result that is printed, written as JSON or as a page, and shown in a notebook.

A page is one file that loads nothing and runs nothing but the script that draws its charts: its content security policy
names that script by its hash. The Jinja2 templates in templates/ are rendered with all values escaped and control
characters made visible.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from finetune import tables
from finetune.report import printing, words
from finetune.report.visible import LINES, visible
from finetune.storage.files import write_text

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = ["finetune.report"]
"""The packages whose folder `templates` has those of views."""


class View:
    """A result for people, on a terminal, as JSON, and with a template in a notebook."""

    template: ClassVar[str] = ""
    """The file in a folder of TEMPLATES; empty for a view that notebooks show as text."""

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
        return _environment().get_template(self.template).render(self.values(), curves=[], plot=plot)


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
        return document(self.title(), self.template, self.charts(), **self.values(), plot="")

    def write(self, path: str | PathLike[str]) -> None:
        """Write a self-contained HTML page. Raises MachineError if it cannot be written."""
        write_text(Path(path), self.page())


# -- pages -------------------------------------------------------------------------------------------------------------

_BREAKS = r"(?<=[_./-])(?<!\de-)(?<!\d[.])(?=\w)"


def document(title: str, template: str, curves: list[dict[str, Any]], **values: Any) -> str:
    """A self-contained HTML document from a template, with a title; `curves` are the charts that it draws."""
    library = f"/*\n{_read('uplot/LICENSE')}*/\n{_read('uplot/uPlot.iife.min.js')}"
    script = library + _read("templates/charts.js") if curves else ""
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            content=template,
            curves=curves,
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            chart_style=_read("uplot/uPlot.min.css") if curves else "",
            **values,
        )
    )


@cache
def _read(name: str) -> str:
    return (resources.files("finetune.report") / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # not needed to print on a terminal

    def shown(value: object) -> object:
        return value if hasattr(value, "__html__") else visible(str(value), LINES)  # `__html__`: rendered by a macro

    environment = Environment(
        loader=ChoiceLoader([*map(PackageLoader, TEMPLATES)]), autoescape=True, undefined=StrictUndefined,
        finalize=shown, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["words"] = words
    safe, escape = environment.filters["safe"], environment.filters["escape"]

    def breakable(name: str) -> Any:
        """A name such as `training.learning_rate`, which a line may break after each part of; not within 1.5e-4."""
        return safe("<wbr>".join(map(escape, re.split(_BREAKS, visible(name, LINES)))))

    environment.filters["breakable"] = breakable
    return environment


tables.complete(__name__)
