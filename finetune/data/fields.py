"""Validated access to the fields of a row: text, whole numbers, lists of objects. Raises RowError naming the field.

Rows from Python may hold anything; `plain` makes them like those of a file.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.config.field_types import shortened
from finetune.data import columnar
from finetune.data.examples import NoSuchField, RowError
from finetune.data.strict_json import Decoder, JsonError

Fields = Mapping[str, Any]

LARGEST = 3.4028234663852886e38
"""The largest number of 32 bits, in which losses are computed."""


def text(fields: Fields, name: str) -> str:
    """A field's text."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise _missing_or(fields, name, "text")
    check_encodable(value, name)
    return value


def integers(fields: Fields, name: str, length: int | None = None) -> list[int]:
    """A field's list of integers, checked against `length` if given."""
    values = listed(fields.get(name), name)
    if not isinstance(values, list):
        raise _missing_or(fields, name, "a list")
    for index, value in enumerate(values):
        if type(value) is not int:
            raise RowError(f"`{name}[{index}]` must be a whole number, not {kind_of(value)}")
    if length is not None and len(values) != length:
        raise RowError(f"`{name}` has {len(values)} values and `input_ids` has {length}")
    return values


def number(value: Any, where: str, *, cure: str = "remove the row") -> float:
    """A number that 32 bits can hold, or the text of one, as a table has it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise RowError(f"`{where}` must be a number, not {kind_of(value)}; {cure}")
    try:
        read = float(value)
    except ValueError:
        raise RowError(f"`{where}` must be a number, not the text {shortened(str(value))!r}; {cure}") from None
    except OverflowError:
        read = math.inf
    if not abs(read) <= LARGEST:
        raise RowError(f"`{where}` must be a number up to {LARGEST:.1e}, not {shortened(str(value))}; {cure}")
    return read


def objects(fields: Fields, name: str) -> list[dict[str, Any]] | None:
    """A field's list of objects, possibly as JSON text; None if empty."""
    objects = parsed(fields.get(name) or None, name)
    if objects is None:
        return None
    if not isinstance(objects, list) or not all(isinstance(one, Mapping) for one in objects):
        raise RowError(f"`{name}` must be a list of objects, not {kind_of(objects)}")
    return [dict(one) for one in objects]


def parsed(value: Any, where: str) -> Any:
    """A value, parsed if it is JSON text, as strictly as a file of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return Decoder().read_strictly(value)
    except JsonError as error:
        raise RowError(f"`{where}`, character {error.at + 1}, is {error}") from None


def listed(value: Any, where: str) -> Any:
    """A value, parsed if it is the JSON text of a list."""
    return parsed(value, where) if isinstance(value, str) and value.lstrip().startswith("[") else value


def is_nothing(value: Any) -> bool:
    """Whether a field is null or empty, as tables fill columns that a row does not use."""
    return value is None or (isinstance(value, (str, bytes, list, Mapping)) and not value)


def check_encodable(text: str, where: str) -> None:
    """Raise RowError for half of a surrogate pair: JSON can escape one, but no tokenizer accepts it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"`{where}` has half of a surrogate pair at character {error.start + 1}") from None


def check_numbers(value: Any, where: str) -> None:
    """Raise RowError for a number inside a value that JSON does not have, which a template would write as NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"`{where}` is {value}, which is not a JSON value; write null, or leave it out")
    if isinstance(value, Mapping):
        for name, one in value.items():
            check_numbers(one, f"{where}.{name}")
    if isinstance(value, list):
        for index, one in enumerate(value):
            check_numbers(one, f"{where}[{index}]")


def kind_of(value: Any) -> str:
    """A value's JSON type, or the Python type of one that JSON lacks, for messages."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    if isinstance(value, Mapping):
        return "an object"
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else kind.__module__ + "."
    return names.get(kind) or f"an object of type {module}{kind.__qualname__}"


def _missing_or(fields: Fields, name: str, wanted: str) -> RowError:
    if name not in fields:
        return NoSuchField(f"`{name}` is missing")
    return RowError(f"`{name}` must be {wanted}, not {kind_of(fields[name])}")


# -- rows from Python ------------------------------------------------------------------------------------------------

# Deeper than any row of a file can be, and shallow enough for Python to go through recursively.
_DEEPEST = 200

_SCALARS = (str, int, float, bool, bytes, type(None))


def plain(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy of a row from Python: mappings become dicts, and tuples lists, as JSON would have them.

    Objects that JSON lacks are copied as they are, for a format from Python to read. Raises RowError for a name of a
    field that is not text, and for a value that can be read only once, contains itself, or cannot be copied or written.
    """
    if wrong := [name for name in _items(fields, "the row") if not isinstance(name, str)]:
        raise RowError(f"the name of a field must be text, not {kind_of(wrong[0])}")
    return {name: _plain(value, name, ()) for name, value in fields.items()}


def as_json(fields: Fields) -> str:
    """A row as text that depends on its content alone, in this process and others."""
    return json.dumps(fields, sort_keys=True, default=_described)


def _plain(value: Any, where: str, within: tuple[int, ...]) -> Any:
    if type(value) is int:
        try:
            str(value)
        except ValueError:
            raise RowError(f"`{where}` is a number of more digits than can be written; leave it out") from None
    if isinstance(value, _SCALARS):
        return value
    if id(value) in within:
        raise RowError(f"`{where}` contains itself; leave it out")
    if len(within) > _DEEPEST:
        raise RowError(f"`{where[:100]}…` is nested more than {_DEEPEST} deep; leave it out")
    inside = (*within, id(value))
    if isinstance(value, Mapping):
        kept: dict[str, Any] = {}
        for key, one in _items(value, f"`{where}`").items():
            if not isinstance(key, (str, int, float, type(None))):
                raise RowError(f"`{where}`: the name of a field must be text, not {kind_of(key)}")
            kept[key if isinstance(key, str) else json.dumps(key)] = _plain(one, f"{where}.{key}", inside)
        if len(kept) < len(value):
            raise RowError(f"`{where}` has two fields of one name: names are text")
        return kept
    if type(value) in (list, tuple):
        return _list(value, where, inside)
    if getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist"):  # an array of NumPy, as pandas makes of a list
        return _list(columnar.as_written(value), where, inside)
    return _copied(value, where)


def _copied(value: Any, where: str) -> Any:
    """A copy of an object that JSON lacks."""
    if isinstance(value, Iterator):
        raise RowError(f"`{where}` is {kind_of(value)}, which can be read only once; give a list")
    try:
        return copy.deepcopy(value)
    except Exception as error:  # any object may be here
        raise RowError(
            f"`{where}` cannot be copied ({type(error).__name__}: {error}); leave it out, or give text, numbers, lists "
            "and dicts"
        ) from None


def _list(value: Sequence[Any], where: str, within: tuple[int, ...]) -> list[Any]:
    if all(type(one) is str or (type(one) is int and -(2**63) <= one < 2**63) for one in value):
        return list(value)  # fast for a list of a million ids
    return [_plain(one, f"{where}[{index}]", within) for index, one in enumerate(value)]


def _items(value: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    try:
        return dict(value)
    except Exception as error:  # a user's own mapping may raise anything
        raise RowError(f"{where} cannot be read ({type(error).__name__}: {error})") from None


def _described(value: Any) -> Any:
    """A value that JSON lacks as JSON: the numbers of an array, or an object's text without its address.

    Of images and of arrays of several dimensions, which are large, a digest.
    """
    try:
        if hasattr(value, "getbands"):  # an image of Pillow
            return ["image", value.size, hashlib.sha256(value.convert("RGBA").tobytes()).hexdigest()]
        if getattr(value, "ndim", 0) > 1 and hasattr(value, "tobytes"):
            return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        if hasattr(value, "tolist"):
            return value.tolist()
        text = str(value)
    except Exception:  # any object may be here
        text = f"<{type(value).__qualname__}>"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text) if text.startswith("<") else text
