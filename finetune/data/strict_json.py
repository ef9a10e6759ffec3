"""JSON as the standard has it, where Python's reader is lenient, and lists of any length item by item."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import DataError

_SPACE = re.compile(r"[ \t\n\r]*")
# Characters of the longest word that is an error when cut off, an escaped surrogate pair, and some room.
_WORD = 16

# Levels of lists and objects within each other: far below where Python's own recursion ends, which later steps share.
_LEVELS = 100


class JsonError(ValueError):
    """Text that is no JSON from its character `at` on, counted from 0."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"not valid JSON: {reason}")
        self.at = at


class Decoder:
    """Reads values. `wrong` says what the last one had that Python would let pass."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)

    def read(self, text: str) -> Any:
        """The one value that `text` is. Raises JsonError."""
        value, end = self.read_at(text, _after_space(text, 0))
        end = _after_space(text, end)
        if end < len(text):
            raise JsonError("Extra data", end)
        return value

    def read_at(self, text: str, start: int) -> tuple[Any, int]:
        """The value that begins at `start`, and where it ends. Raises JsonError."""
        self.wrong = []
        try:
            value, end = self._decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise JsonError(error.msg, error.pos) from None
        except RecursionError:
            raise JsonError("nested too deeply", start) from None
        except ValueError:
            raise JsonError("a whole number of more than 4300 digits, which Python does not read", start) from None
        if text.count("[", start, end) + text.count("{", start, end) > _LEVELS and _is_deep(value):
            raise JsonError("nested too deeply", start)
        return value, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = repeated(key for key, _ in pairs)
            self.wrong.append(f"the key `{twice}` is given twice in one object; keep one")
        return fields

    def _constant(self, name: str) -> None:
        self.wrong.append(f"{name} is no JSON value; write null, or leave the field out")


class ListReader:
    """The items of the one list that a JSON file holds, decoded one at a time from text that comes in `pieces`.

    Raises DataError with file:line:column, also for an item of more than `limit` characters.
    """

    def __init__(self, path: Path, pieces: Iterator[str], limit: int) -> None:
        self._path = path
        self._pieces = pieces
        self._limit = limit
        self._decoder = Decoder()
        self._text = ""  # what was read and is not forgotten yet
        self._at = 0  # where reading goes on in it
        self._line, self._column = 1, 1  # of its first character

    def items(self) -> Iterator[tuple[Any, list[str]]]:
        """Each item, and what is wrong in its text that Python would let pass."""
        if self._peek() not in ("[", ""):
            raise DataError(f"{self._path}: {self._instead_of_a_list()}")
        separator = self._take("[", "Expecting value")
        if self._peek() == "]":
            separator = self._take("]", "")
        while separator != "]":
            yield self._value()
            separator = self._take(",]", "Expecting ',' delimiter")
        if self._peek():
            raise self._error("not valid JSON: Extra data", self._at)

    def _instead_of_a_list(self) -> str:
        """What to do with a file that begins with something else."""
        key = re.match(r'\{\s*"(\w+)"\s*:\s*\[', self._text[self._at : self._at + 200])
        if key:
            return f"expected a list of objects, not an object with `{key[1]}`; take it out with `jq .{key[1]}`"
        return "expected a list of objects; for one object a line, name the file .jsonl"

    def _peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self._at = _after_space(self._text, self._at)
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _take(self, wanted: str, otherwise: str) -> str:
        """Go past the next character, one of `wanted`."""
        found = self._peek()
        if not found or found not in wanted:
            raise self._error(f"not valid JSON: {otherwise}", self._at)
        self._at += 1
        return found

    def _value(self) -> tuple[Any, list[str]]:
        self._peek()
        while True:
            try:
                value, end = self._decoder.read_at(self._text, self._at)
            except JsonError as error:
                # A string that does not end, and any error close to the end, may only wait for the next piece.
                cut = "Unterminated string" in str(error) or error.at > len(self._text) - _WORD
                if not cut or not self._more():
                    raise self._error(str(error), error.at) from None
                continue
            if end - self._at > self._limit:
                raise self._too_long()
            # So may a number that ends there.
            if end < len(self._text) or not self._more():
                self._at = end
                return value, self._decoder.wrong

    def _more(self) -> bool:
        """Read on, at least as much again as is left, so that a long item is tried a few times only."""
        left = self._text[self._at :]
        if len(left) > self._limit:
            raise self._too_long()
        added = []
        wanted = min(len(left), self._limit - len(left))
        while wanted >= 0 and (piece := next(self._pieces, "")):
            added.append(piece)
            wanted -= len(piece)
        if not added:
            return False
        self._line, self._column = self._place(self._at)
        self._text, self._at = "".join([left, *added]), 0
        return True

    def _too_long(self) -> DataError:
        return self._error(f"an item is longer than {self._limit // 2**20} MiB, which no row is", self._at)

    def _place(self, at: int) -> tuple[int, int]:
        line_breaks = self._text.count("\n", 0, at)
        if not line_breaks:
            return self._line, self._column + at
        return self._line + line_breaks, at - self._text.rfind("\n", 0, at)

    def _error(self, message: str, at: int) -> DataError:
        line, column = self._place(at)
        return DataError(f"{self._path}:{line}:{column}: {message}")


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _is_deep(value: Any) -> bool:
    """Whether there are more than `_LEVELS` levels of lists and objects."""
    level = [value]
    for _ in range(_LEVELS):
        inner = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def repeated(names: Iterable[str]) -> str | None:
    """The first name that was there before; None where all differ."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
