"""Explain what validation refused in a config: where it stands, what is wrong, and what to write instead."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from finetune.config import other_names
from finetune.config.field_types import Usual, nearest, shortened, shown
from finetune.config.sections import Config, Section, Source

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Locations:
    """Where the keys of a config were written: `job.yaml:12`, or the override that set them."""

    file: str
    known: dict[KeyPath, str]

    def of(self, path: KeyPath) -> str:
        """The location of a key, or of the innermost section around it that has one."""
        return next((self.known[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.known), self.file)


@dataclass(frozen=True)
class _Mistake:
    """One refused value, as it was `given` in words too: pydantic's reports of it, one for each branch of a union."""

    path: KeyPath
    key: str
    value: Any
    given: str
    reports: list[Any]
    locations: Locations

    @property
    def not_offered(self) -> str | None:
        """The advice for a value that other tools have and this one does not."""
        return other_names.not_offered(".".join(self.path[:2]), self.given)

    def says(self, message: str, *inner: str) -> str:
        """The message with the location of this key, or of an `inner` one."""
        return f"{self.locations.of((*self.path, *inner))}: {message}"


def mistakes(error: ValidationError, locations: Locations) -> list[str]:
    """One message a mistake: location, key, what is wrong and what to write.

    pydantic reports each branch of a union that failed. Where a branch got further in (an item of a list), the branches
    that stopped before it say nothing useful.
    """
    by_path: dict[KeyPath, list[Any]] = {}
    for report in error.errors():
        by_path.setdefault(_key_path(report["loc"]), []).append(report)
    messages = []
    for path, reports in by_path.items():
        if any(len(other) > len(path) and other[: len(path)] == path for other in by_path):
            continue
        value = reports[0]["input"]
        given = value if isinstance(value, str) else shown(value)
        mistake = _Mistake(path, shortened(".".join(path)), value, given, reports, locations)
        messages.append(_EXPLANATIONS.get(reports[0]["type"], _wrong_type)(mistake))
    return messages


def instead(key: str, meant: str) -> str:
    """Say that `key` is another tool's, and what it is called here."""
    return f"`{key}` is another tool's key; {'' if meant.startswith('leave') else 'write '}{meant}"


def field(path: KeyPath) -> FieldInfo | None:
    """The field of `section.key`, if there is one."""
    section: Any = Config.model_fields[path[0]].annotation if path[0] in Config.model_fields else None
    return section.model_fields.get(path[1]) if section and len(path) == 2 else None


def section_in(path: KeyPath) -> type[Section] | None:
    """The section that can be the value of `section.key`, such as that of `model.rope_scaling`."""
    described = field(path)
    parts = typing.get_args(described.annotation) if described else ()
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


def _unknown_key(mistake: _Mistake) -> str:
    path, key, value = mistake.path, mistake.key, mistake.value
    if meant := other_names.meant(path[-1], value):
        return mistake.says(instead(key, meant))
    section, _, name = path[-1].partition(".")
    if len(path) == 1 and section in Config.model_fields and name in _known_keys((section,)):
        return mistake.says(
            f"`{key}` is a key of a section; write `{section}:` and `{name}` on an indented line below it"
        )
    remedy = nearest(path[-1], _known_keys(path[:-1]))
    # Other tools have other sections, whose keys may have a counterpart here.
    inside = value if len(path) == 1 and isinstance(value, dict) else {}
    moved = {name: meant for name in map(str, inside) if (meant := other_names.meant(name, inside.get(name)))}
    if moved and "did you mean" not in remedy:
        return "\n".join(mistake.says(instead(f"{key}.{name}", meant), name) for name, meant in moved.items())
    return mistake.says(f"unknown {'section' if len(path) == 1 else 'key'} `{key}`; {remedy}")


def _refused_value(mistake: _Mistake) -> str:
    """Explain a value that one of our own checks refused, such as a name that its table lacks."""
    reason = str(mistake.reports[0]["ctx"]["error"])
    here = other_names.name_here(mistake.given)
    if here in reason.partition("choose from ")[2].split(", "):
        return mistake.says(f"`{mistake.key}`: `{mistake.given}` is another tool's word; write `{here}`")
    return mistake.says(f"`{mistake.key}`: {mistake.not_offered or reason}")


def _wrong_type(mistake: _Mistake) -> str:
    here = other_names.name_here(mistake.given)
    expected = " or ".join(dict.fromkeys(_expected(branch) for branch in mistake.reports))
    first = mistake.reports[0]
    renamed = first["type"] == "literal_error" and repr(here) in first["ctx"]["expected"]
    if mistake.not_offered and not renamed:
        return mistake.says(f"`{mistake.key}`: {mistake.not_offered}")
    described = field(mistake.path)
    ranges = [mark.range for mark in (described.metadata if described else ()) if isinstance(mark, Usual)]
    remedy = f"; write `{here}`" if repr(here) in expected else f"; {ranges[0]} is usual" if ranges else ""
    return mistake.says(f"`{mistake.key}`: expected {expected}, not {shown(mistake.value)}{remedy}")


_EXPLANATIONS: dict[str, Callable[[_Mistake], str]] = {
    "extra_forbidden": _unknown_key,
    "value_error": _refused_value,
    "missing": lambda mistake: mistake.says(f"`{mistake.key}` is missing"),
    "model_type": lambda mistake: mistake.says(
        f"`{mistake.key}` is a section; write {_in_section(mistake.path, mistake.value)}"
    ),
}


def _in_section(path: KeyPath, value: Any) -> str:
    """The correction of a value in place of a section, such as Axolotl's `adapter: qlora`."""
    if not isinstance(value, str):
        return "its keys on indented lines below it"
    keys = _known_keys(path)
    if (line := re.fullmatch(r"(\w+)\s*[:=]\s*(\S.*)", value)) and line[1] in keys:
        return f"`{line[1]}: {shortened(line[2], 60)}`, with a space after the colon, on an indented line below it"
    main = next(iter(keys))
    if meant := other_names.meant(value):
        return meant
    if cure := other_names.not_offered(f"{path[-1]}.{main}", value):
        return f"`{path[-1]}.{main}`; {cure}"
    return f"`{path[-1]}.{main}: {other_names.name_here(shortened(value, 60))}`"


def _expected(item: Any) -> str:
    """The type or range that a branch of a union accepts, to follow the word "expected"."""
    wanted = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping such as {name: value}",
        "string_too_short": "a name",
        "too_short": "a list that is not empty",
        "model_type": "a `source` with its `weight`",
        "finite_number": "a finite number",
        "literal_error": item.get("ctx", {}).get("expected", ""),
    }
    words = str(item["msg"]).removeprefix("Input should be ")
    return wanted.get(item["type"], f"a number {words}" if words.startswith(("greater", "less")) else words)


def _key_path(location: tuple[Any, ...]) -> KeyPath:
    """The key path of a pydantic location, without the names of union branches and validators it adds."""
    path: list[str] = []
    for before, part in zip((None, *location), location, strict=False):
        in_section = path and path[0] in Config.model_fields
        inner = in_section and len(path) == 2 and section_in((path[0], path[1]))
        names_key = not path or (in_section and len(path) == 1) or inner or before == Source.__name__
        if names_key or isinstance(part, int):
            path.append(str(part))
    return tuple(path)


def _known_keys(path: KeyPath) -> list[str]:
    if len(path) > 1:
        return list((section_in(path) or Source).model_fields)  # Source stands in a list
    model: type[Section] = Config
    for part in path:
        model = model.model_fields[part].annotation  # type: ignore[assignment]
    return list(model.model_fields)
