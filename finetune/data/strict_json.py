"""Strict JSON: what the standard forbids and Python's reader accepts is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")

# Levels of lists and objects within each other: far below where Python's own recursion ends, which later steps share.
_LEVELS = 100


class JsonError(ValueError):
    """Text that is no JSON from its character `at` on, counted from 0."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"not valid JSON: {reason}")
        self.at = at


class Decoder:
    """Reads values. `wrong` lists what Python would have accepted in the last one: repeated keys and NaN."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)

    def read(self, text: str) -> Any:
        """The one value that `text` is. Raises JsonError."""
        value, end = self._read_at(text, _after_space(text, 0))
        _expect_end(text, end)
        return value

    def items(self, text: str) -> Iterator[tuple[Any, int, int]]:
        """Each item of the one list that `text` is, and where it starts and ends. Raises JsonError."""
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
        """The value that begins at `start`, and where it ends."""
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
            raise JsonError("a whole number of more than 4300 digits, which Python does not read", start) from None
        return value, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = repeated(key for key, _ in pairs)
            self.wrong.append(f"the key `{twice}` is given twice in one object; keep one")
        return fields

    def _constant(self, name: str) -> None:
        self.wrong.append(f"{name} is no JSON value; write null, or leave the field out")


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _expect(text: str, at: int, wanted: str, otherwise: str) -> int:
    """Where text goes on behind the next character, one of `wanted`."""
    at = _after_space(text, at)
    if not text.startswith(tuple(wanted), at):
        raise JsonError(otherwise, at)
    return at + 1


def _expect_end(text: str, at: int) -> None:
    if (end := _after_space(text, at)) < len(text):
        raise JsonError("Extra data", end)


def _depth(value: Any) -> int:
    """Levels of lists and objects. Raises RecursionError where Python has no room for them."""
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def repeated(names: Iterable[str]) -> str | None:
    """The first name that was there before; None where all differ."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
