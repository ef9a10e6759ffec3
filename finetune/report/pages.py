"""Pages from the Jinja2 templates in templates/: all values are escaped and their control characters made visible."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from finetune.report import words
from finetune.report.visible import LINES, visible

if TYPE_CHECKING:
    from jinja2 import Environment


def page(title: str, template: str, **values: Any) -> str:
    """A self-contained HTML document of one template under a title."""
    return fragment("page.html.j2", title=title, content=template, **values)


def fragment(template: str, **values: Any) -> str:
    """A template by itself, as a notebook shows it."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # printing on a terminal need not wait for it

    def shown(value: object) -> object:
        return value if hasattr(value, "__html__") else visible(str(value), LINES)  # markup: what a macro has rendered

    environment = Environment(
        loader=PackageLoader("finetune.report"), autoescape=True, undefined=StrictUndefined, finalize=shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["words"] = words
    return environment
