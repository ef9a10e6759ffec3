"""Strict JSON: rejects what Python's parser accepts although the standard forbids it, or no float can hold it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")

# Maximum nesting depth: far below Python's recursion limit, because later steps recurse too.
_LEVELS = 100

# Characters of a number in a message.
_SHOWN = 40


class JsonError(ValueError):
    """Text that is not valid JSON from character `at` (0-based) on."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"not valid JSON: {reason}")
        self.at = at


class Decoder:
    """Parses values. `wrong` lists what Python would have accepted in the last one: repeated keys, NaN and 1e999."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, parse_float=self._float
        )

    def read(self, text: str) -> Any:
        """Parse `text` as one value. Raises JsonError."""
        value, end = self._read_at(text, _after_space(text, 0))
        _expect_end(text, end)
        return value

    def read_strictly(self, text: str) -> Any:
        """Parse `text` as one value of which nothing is `wrong`. Raises JsonError."""
        value = self.read(text)
        for wrong in self.wrong:
            raise JsonError(wrong, 0)
        return value

    def items(self, text: str) -> Iterator[tuple[Any, int, int]]:
        """Parse `text` as one list; yield each item with its start and end. Raises JsonError."""
        at = _expect(text, 0, "[", "Expecting value")
        separator = ","
        if text.startswith("]", _after_space(text, at)):
            at, separator = _after_space(text, at) + 1, "]"
        while separator == ",":
            start = _after_space(text, at)
            value, end = self._read_at(text, start)
            yield value, start, end
            at = _expect(text, end, ",]", "Expecting ',' delimiter")
            separator = text[at - 1]
        _expect_end(text, at)

    def _read_at(self, text: str, start: int) -> tuple[Any, int]:
        self.wrong = []
        try:
            value, end = self._decoder.raw_decode(text, start)
            if text.count("[", start, end) + text.count("{", start, end) > _LEVELS and _depth(value) > _LEVELS:
                raise RecursionError
        except json.JSONDecodeError as error:
            raise JsonError(error.msg, error.pos) from None
        except RecursionError:
            raise JsonError("nested too deeply", start) from None
        except ValueError:
            raise JsonError("an integer of more than 4300 digits, which Python does not parse", start) from None
        return value, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = repeated(key for key, _ in pairs)
            self.wrong.append(f"the key `{twice}` is given twice in one object; keep one")
        return fields

    def _constant(self, name: str) -> None:
        self.wrong.append(f"{name} is not a JSON value; write null, or leave the field out")

    def _float(self, digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            self.wrong.append(f"{digits[:_SHOWN]} is larger than any number of 64 bits; leave the field out")
        return number


def _after_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    assert space is not None
    return space.end()


def _expect(text: str, at: int, wanted: str, otherwise: str) -> int:
    """Skip white space and one character of `wanted`; return the index after it."""
    at = _after_space(text, at)
    if not text.startswith(tuple(wanted), at):
        raise JsonError(otherwise, at)
    return at + 1


def _expect_end(text: str, at: int) -> None:
    if (end := _after_space(text, at)) < len(text):
        raise JsonError("Extra data", end)


def _depth(value: Any) -> int:
    """Nesting depth of lists and objects. Raises RecursionError beyond Python's limit."""
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def repeated(names: Iterable[str]) -> str | None:
    """The first name that occurs a second time, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
