"""Validated access to the fields of a row: text, whole numbers, lists of objects. Raises RowError naming the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from finetune.data.examples import NoSuchField, RowError

Fields = Mapping[str, Any]


def text(fields: Fields, name: str) -> str:
    """A field's text."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise _missing_or(fields, name, "text")
    check_encodable(value, name)
    return value


def integers(fields: Fields, name: str, length: int | None = None) -> list[int]:
    """A field's list of integers, checked against `length` if given."""
    values = fields.get(name)
    if not isinstance(values, list):
        raise _missing_or(fields, name, "a list")
    for index, value in enumerate(values):
        if type(value) is not int:
            raise RowError(f"`{name}[{index}]` must be a whole number, not {kind_of(value)}")
    if length is not None and len(values) != length:
        raise RowError(f"`{name}` has {len(values)} values and `input_ids` has {length}")
    return values


def objects(fields: Fields, name: str) -> list[dict[str, Any]] | None:
    """A field's list of objects, possibly as JSON text; None if empty."""
    found = parsed(fields.get(name) or None, name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise RowError(f"`{name}` must be a list of objects, not {kind_of(found)}")
    return [dict(one) for one in found]


def parsed(value: Any, where: str) -> Any:
    """A value, parsed if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"`{where}` is not valid JSON: {error}") from None


def is_nothing(value: Any) -> bool:
    """Whether a field is null or empty, as tables fill columns that a row does not use."""
    return value is None or (isinstance(value, (str, bytes, list, Mapping)) and not value)


def check_encodable(text: str, where: str) -> None:
    """Raise RowError for half of a surrogate pair: JSON can escape one, but it is no character to any tokenizer."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"`{where}` has half of a surrogate pair at character {error.start + 1}") from None


def kind_of(value: Any) -> str:
    """A value's JSON type, for messages."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def _missing_or(fields: Fields, name: str, wanted: str) -> RowError:
    if name not in fields:
        return NoSuchField(f"`{name}` is missing")
    return RowError(f"`{name}` must be {wanted}, not {kind_of(fields[name])}")
