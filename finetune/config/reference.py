"""The documentation of the config: JSON schema and Markdown, generated from the field docstrings and the tables."""

from __future__ import annotations

import re
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

from finetune.config.field_types import Choice, Choices
from finetune.config.sections import Config, Section


def json_schema(choices: Choices) -> dict[str, Any]:
    """JSON schema of a config file; choice fields list their table's names.

    It holds for files that are read as YAML 1.1, too, as some editors read them (see `_as_yaml_1_1`), and a section
    or file with nothing in it has its defaults. It does not say which values of several keys go together: `load` does.
    """
    schema = Config.model_json_schema()
    schema["type"] = ["object", "null"]
    for section in schema["properties"].values():
        section["anyOf"] = [{"$ref": section.pop("$ref")}, {"type": "null"}]
    _as_yaml_1_1(schema["$defs"])
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "finetune config"
    for _, section in _sections():
        properties = schema["$defs"][section.__name__]["properties"]
        for key, field in section.model_fields.items():
            if choice := _choice(field):
                names = {"enum": list(choices[choice.table])}
                if choice.or_file:
                    properties[key]["anyOf"] = [names, {"pattern": f"{re.escape(choice.or_file)}$"}]
                    continue
                alone, several = properties[key].get("anyOf", (properties[key], {}))  # see `OneOrMore`
                alone.update(names)
                if several:
                    several["items"] = alone
    return schema


# Numbers of YAML 1.2 that are text in YAML 1.1 (https://yaml.org/type/float.html, https://yaml.org/type/int.html):
# 2e-4 and 1.5e3, whose exponents have no sign or whose digits no point; 0o17 and 08.
_TEXT_IN_1_1 = {
    "number": r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$|^[-+]\.[0-9]+$",
    "integer": r"^0o[0-7]+$|^[-+]?0[0-9]+$",
}


def _as_yaml_1_1(schema: Any) -> None:
    """Let each number within `schema` also be the text that YAML 1.1 takes it for, and `on` and `off` its booleans."""
    if isinstance(schema, list):
        for part in schema:
            _as_yaml_1_1(part)
    elif isinstance(schema, dict):
        for part in list(schema.values()):
            _as_yaml_1_1(part)
        if (kind := schema.get("type")) in ("number", "integer"):
            bounds = {key: schema.pop(key) for key in list(schema) if key in ("type", *_BOUNDS)}
            schema["anyOf"] = [bounds, {"type": "string", "pattern": _TEXT_IN_1_1[kind]}]
        names = schema.get("enum", [])
        others: list[dict[str, Any]] = [
            {"const": value, "doNotSuggest": True} for name, value in (("on", True), ("off", False)) if name in names
        ]
        if any(isinstance(name, float) for name in names):
            others.append({"type": "string", "pattern": _TEXT_IN_1_1["number"]})
        if others:
            schema["anyOf"] = [{"enum": schema.pop("enum")}, *others]
            schema.pop("type", None)


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def markdown(choices: Choices) -> str:
    """A list for each section: key, default, meaning; and below it what each choice means."""
    lines = [
        "# Config reference",
        "",
        "Made by `finetune schema --markdown` from the docstrings of `finetune/config/sections.py`; do not edit.",
        "Each key can be set in the file or as `section.key=value` on the command line.",
        "",
        "## In an editor",
        "",
        "`finetune schema > config.schema.json` writes a JSON schema. With this as the first line of a config, editors",
        "that use the YAML language server (VS Code with its YAML extension, Neovim, Helix, Emacs) complete keys,",
        "explain them and mark mistakes. The configs of this repository name [its schema](config.schema.json) so:",
        "",
        "```yaml",
        "# yaml-language-server: $schema=config.schema.json",
        "```",
    ]
    for name, section in _sections():
        lines += ["", f"## `{name}`", "", " ".join((section.__doc__ or "").split()), ""]
        tables = []
        for key, field in section.model_fields.items():
            default = field.default if isinstance(field.default, str) else str(field.default).lower()
            default = "null" if field.default is None else default
            lines.append(f"- `{key}: {default}`: {' '.join((field.description or '').split())}{_allowed(field)}")
            if choice := _choice(field):
                tables.append(choice)
        for choice in tables:
            file = f" (or the path of a {choice.or_file} file)" if choice.or_file else ""
            lines += ["", f"`{choice.table}` is one of{file}:", ""]
            entries = choices[choice.table]
            lines += [f"- `{entry_name}`: {entry.help}" for entry_name, entry in entries.items()]
            ignoring: dict[tuple[str, ...], list[str]] = {}
            for entry_name, entry in entries.items():
                if ignored := tuple(getattr(entry, "ignores", ())):
                    ignoring.setdefault(ignored, []).append(entry_name)
            for ignored, names in ignoring.items():
                keys, by = (", ".join(f"`{name}`" for name in listed) for listed in (ignored, names))
                lines += ["", f"{keys} cannot be set with {by}."]
    return "\n".join(lines) + "\n"


def _sections() -> list[tuple[str, type[Section]]]:
    return [(name, typing.cast(type[Section], field.annotation)) for name, field in Config.model_fields.items()]


def _choice(field: FieldInfo) -> Choice | None:
    """The mark of a choice field, also where the choice is the item of a list."""
    inner = (mark for part in typing.get_args(field.annotation) for mark in getattr(part, "__metadata__", ()))
    return next((mark for mark in (*field.metadata, *inner) if isinstance(mark, Choice)), None)


def _allowed(field: FieldInfo) -> str:
    """The values of a Literal, as a sentence, and what may stand beside them."""
    union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(field.annotation) if union else (field.annotation,)
    for part in parts:
        if typing.get_origin(part) is typing.Literal:
            values = ", ".join(f"`{value}`" for value in typing.get_args(part))
            beside = [other for other in parts if other not in (part, type(None))]
            plain = [typing.get_args(other)[0] if hasattr(other, "__metadata__") else other for other in beside]
            other = f", or a {'number' if plain[0] in (int, float) else 'list'}" if plain else ""
            return f" One of {values}{other}."
    return ""
