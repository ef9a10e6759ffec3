"""Keys and values that earlier versions had, by `gone.json`: refused with what to use instead, and read from old runs.

    "keys": {"section.key": {"default": its former default, "instead": what to use}}
    "values": {"section.key": {"value": {"instead": what to use, "read_as": the value for a finished run}}}

An entry may say in `lost` why the weights of a run that used it cannot be merged, exported or run any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    resources.files(__package__).joinpath("gone.json").read_text(encoding="utf-8")
)


class Gone(NamedTuple):
    """What a config used that is gone: its `section.key`, what to use instead, and `lost` of its entry."""

    key: str
    message: str
    lost: str | None


def taken_out(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Gone]]:
    """The sections of a config as this version reads those of an earlier one: without the keys that are gone, and with
    other values for those that are; and what it used of them.

    A key at its default changed nothing: the resolved config of each earlier run has it.
    """
    values = {name: dict(section) if isinstance(section, Mapping) else section for name, section in values.items()}
    used = []
    for key, entries in TABLE["values"].items():
        section, name = _place(values, key)
        written = section.get(name)
        if entry := entries.get(written.lower() if isinstance(written, str) else ""):
            section[name] = entry["read_as"]
            used.append(Gone(key, f"`{written}` was removed; {entry['instead']}", entry.get("lost")))
    for key, entry in TABLE["keys"].items():
        section, name = _place(values, key)
        if name in section and section.pop(name) != entry["default"]:
            used.append(Gone(key, f"this key was removed; {entry['instead']}", entry.get("lost")))
    return values, used


def _place(values: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section of `section.key`, empty if there is none, and the name of the key in it."""
    section, _, name = key.partition(".")
    found = values.get(section)
    return found if isinstance(found, dict) else {}, name
