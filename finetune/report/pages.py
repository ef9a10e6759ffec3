"""Renders the Jinja2 templates in templates/, with all values escaped and control characters made visible.

A page is one file that loads nothing and runs nothing but the script that draws its charts: its content security policy
names that script by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from finetune.report import words
from finetune.report.visible import LINES, visible

if TYPE_CHECKING:
    from jinja2 import Environment


_PARTS = r"(?<=[_./-])(?<!\de-)(?<!\d[.])(?=\w)"


def page(title: str, template: str, curves: list[dict[str, Any]], **values: Any) -> str:
    """A self-contained HTML document from a template, with a title; `curves` are the charts that it draws."""
    library = f"/*\n{_read('uplot/LICENSE')}*/\n{_read('uplot/uPlot.iife.min.js')}"
    script = library + _read("templates/charts.js") if curves else ""
    return fragment(
        "page.html.j2",
        title=title,
        content=template,
        curves=curves,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        chart_style=_read("uplot/uPlot.min.css") if curves else "",
        **values,
    )


def fragment(template: str, **values: Any) -> str:
    """The HTML of a template alone, for notebooks."""
    return _environment().get_template(template).render(values)


@cache
def _read(name: str) -> str:
    return (resources.files("finetune.report") / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not needed to print on a terminal

    def shown(value: object) -> object:
        return value if hasattr(value, "__html__") else visible(str(value), LINES)  # `__html__`: rendered by a macro

    environment = Environment(
        loader=PackageLoader("finetune.report"), autoescape=True, undefined=StrictUndefined, finalize=shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["words"] = words
    safe, escape = environment.filters["safe"], environment.filters["escape"]

    def breakable(name: str) -> Any:
        """A name such as `training.learning_rate`, which a line may break after each part of; not within 1.5e-4."""
        return safe("<wbr>".join(map(escape, re.split(_PARTS, visible(name, LINES)))))

    environment.filters["breakable"] = breakable
    return environment
