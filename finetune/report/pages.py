"""Renders the Jinja2 templates in templates/, with all values escaped and control characters made visible."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from finetune.report import words
from finetune.report.visible import LINES, visible

if TYPE_CHECKING:
    from jinja2 import Environment


def page(title: str, template: str, **values: Any) -> str:
    """A self-contained HTML document from a template, with a title."""
    return fragment("page.html.j2", title=title, content=template, **values)


def fragment(template: str, **values: Any) -> str:
    """The HTML of a template alone, for notebooks."""
    return _environment().get_template(template).render(values)


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
    return environment
