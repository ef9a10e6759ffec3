"""Field types of the config: names chosen from a table, byte sizes, and the checkpointing choice."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from finetune.errors import ConfigError

T = TypeVar("T")

Choices = Mapping[str, Mapping[str, Any]]
"""For each table key (`optimizer.kind`) its entries by name; each entry has a text `help`."""

GIVEN = "python:"
"""Begins the names of rows and functions that a Python program gave; only that program has them."""


def name_of(function: Callable[..., Any]) -> str:
    """The name by which a config refers to a function given from Python. Raises ConfigError if it has none."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ConfigError(f"{shown(function)}: the run's config keeps a function by its name; define it with `def`")
    return GIVEN + name


def not_given(name: str) -> str:
    """The message for the name of a function that this process was not given."""
    return f"`{name}` was given from Python and is not kept on disk: run the program that gave it again"


def source_name(source: str) -> str:
    """A source of rows as a person names it."""
    return f"rows given from Python (hash {source.removeprefix(GIVEN)})" if source.startswith(GIVEN) else source


@dataclass(frozen=True)
class Help:
    """An entry of a table that needs no more than a name and its help."""

    help: str


@dataclass(frozen=True)
class Choice:
    """Marks a string field whose allowed names are the keys of one table.

    The tables stand beside what they configure, above this package; they reach validation as
    `context={"choices": …}`. Without that context any string passes. `or_file` is the ending of files that may be
    named instead. What was given from Python is in the table of that process alone; with `"trained": True` in the
    context, its name passes anywhere.
    """

    table: str
    or_file: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(name: str, info: ValidationInfo) -> str:
            context = info.context or {}
            tables: Choices = context.get("choices", {})
            if self.table not in tables or name in tables[self.table] or (self.or_file and name.endswith(self.or_file)):
                return name
            if name.startswith(GIVEN):
                if context.get("trained"):
                    return name
                raise ValueError(not_given(name))
            other = f", or a {self.or_file} file" if self.or_file else ""
            raise ValueError(unknown(name, tables[self.table]) + other)

        return core_schema.with_info_after_validator_function(check, handler(source))


@dataclass(frozen=True)
class Usual:
    """Marks a number with the range that jobs use, for the message about one that no job can."""

    range: str


class OneOrMore:
    """Marks a list of names: one name alone is a list of one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: [value] if isinstance(value, str) else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        several = handler(schema)
        return {"anyOf": [several["items"], several]}


_OF_PATTERNS = re.compile(r"[][(){}*+?|^$\\]")


def is_pattern(target: str) -> bool:
    """Tell a regular expression from a module's name, by characters that no name has."""
    return _OF_PATTERNS.search(target) is not None


def _compiles(form: str) -> AfterValidator:
    """Check that a target is a regular expression once it replaces `{}` in `form`."""

    def check(target: str) -> str:
        try:
            re.compile(form.format(target) if is_pattern(target) else "")
        except re.error as error:
            raise ValueError(f"`{shortened(target)}` is not a regular expression: {error}") from None
        return target

    return AfterValidator(check)


TargetName = Annotated[str, _compiles("{}")]
"""The name of a module, or a regular expression for full names of modules."""

TargetNameEnd = Annotated[str, _compiles("({})")]
"""The same for the end of full names, as PEFT's patterns are, which it puts in parentheses."""


def unknown(name: str, known: Iterable[str]) -> str:
    """The message that `name` is unknown: the nearest known name, and the list of all, or of the first if there are
    many.
    """
    return f"`{shortened(name)}` is not known; {nearest(name, known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a question, and the list of all, or of the first if there are many."""
    known = list(known)
    if not known:
        return "there are none"
    near = [one for one in known if one.lower() == name.lower()]
    near = near or difflib.get_close_matches(name[:_LONGEST_SHOWN], known, n=1, cutoff=0.5)
    if near == known:
        return f"did you mean `{near[0]}`?"
    hint = f"did you mean `{near[0]}`? " if near else ""
    more = f" and {len(known) - _MOST_LISTED:,} more" if len(known) > _MOST_LISTED else ""
    return f"{hint}choose from {', '.join(known[:_MOST_LISTED])}{more}"


def pick(table: Mapping[Any, T], name: str, what: str) -> T:
    """The entry `name` of a table. Raises ConfigError with the nearest name and the list of all."""
    if not isinstance(name, str) or name not in table:
        raise ConfigError(f"{what} {unknown(str(name), table)}")
    return table[name]


_LONGEST_SHOWN = 200
_MOST_LISTED = 50


def shortened(text: str, length: int = _LONGEST_SHOWN) -> str:
    """`text`, truncated for an error message."""
    return text if len(text) <= length else text[: length - 3] + "..."


# More digits than any size has are refused by the bound of the field.
_SIZE = re.compile(r"^\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(B|KiB|MiB|GiB|TiB)\s*$")
_LARGEST_SIZE = 2**60
_UNIT_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def shown(value: Any, length: int = 60) -> str:
    """A value as Python writes it, shortened, for messages; some values cannot be written."""
    try:
        return shortened(repr(value), length)
    except Exception:  # whatever a class's own `__repr__` raises, and ValueError for a number of 4301 digits
        return f"a value that cannot be shown, of type {type(value).__name__}"


def parse_size(value: Any) -> Any:
    """Bytes from `"24GiB"`, `"512 MiB"` or a whole number; other values are left for the type check to refuse."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if not match:
        raise ValueError(
            f"`{shortened(value)}` is not a size; write a number with B, KiB, MiB, GiB or TiB, such as 24GiB"
        )
    return int(Decimal(match.group(1)) * _UNIT_BYTES[match.group(2)])


Size = Annotated[
    int,
    Field(gt=0, le=_LARGEST_SIZE),
    BeforeValidator(parse_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0, "maximum": _LARGEST_SIZE},
                {"type": "string", "pattern": _SIZE.pattern},
            ],
            "examples": ["24GiB"],
        }
    ),
]

_EVERY = re.compile(r"every-([1-9][0-9]{0,5})")
LEVELS = ("none", "keep-both", "keep-products", "keep-attention", "all")
"""Checkpointing levels of a layer, from nothing recomputed to everything."""
_CHECKPOINTING = (*LEVELS, "auto")
_LAYERS = 10**6
_NUMBER = {"type": "integer", "minimum": 0, "exclusiveMaximum": _LAYERS}


def _check_checkpointing(value: str | int | dict[str, int]) -> str | int | dict[str, int]:
    if isinstance(value, str):
        if value not in _CHECKPOINTING and not _EVERY.fullmatch(value):
            raise ValueError(
                f"`{shortened(value)}` is not known; choose {', '.join(_CHECKPOINTING)}, every-2 (every n-th layer), a "
                "number of layers, or numbers by level, such as {all: 20, keep-products: 12}"
            )
        return value
    numbers = value if isinstance(value, dict) else {"all": value}
    if not numbers:
        raise ValueError("name a level with a number of layers, such as {all: 20, keep-products: 12}")
    for level, layers in numbers.items():
        if level not in LEVELS:
            raise ValueError(unknown(level, LEVELS))
        if not 0 <= layers < _LAYERS:
            raise ValueError(f"a number of layers is zero or more, and below {_LAYERS}")
    return value


Checkpointing = Annotated[
    str | int | dict[str, int],
    AfterValidator(_check_checkpointing),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(_CHECKPOINTING)},
                {"type": "string", "pattern": f"^{_EVERY.pattern}$"},
                _NUMBER,
                {
                    "type": "object",
                    "properties": dict.fromkeys(LEVELS, _NUMBER),
                    "additionalProperties": False,
                    "minProperties": 1,
                },
            ]
        }
    ),
]


def every_n(checkpointing: Any) -> int | None:
    """The n of `every-n`, or None for the other forms."""
    match = _EVERY.fullmatch(checkpointing) if isinstance(checkpointing, str) else None
    return int(match.group(1)) if match else None


# Linux accepts paths of less than 4,096 bytes, with names of at most 255 (limits.h).
_PATH_BYTES, _NAME_BYTES = 4095, 255


def _check_path(path: str) -> str:
    path = os.path.expanduser(path)
    if path.startswith("~"):
        raise ValueError(f"there is no such user; write ./{shortened(path)} for a folder of that name")
    if len(path.encode()) > _PATH_BYTES or any(len(name.encode()) > _NAME_BYTES for name in path.split("/")):
        raise ValueError(
            f"longer than a path can be, {_PATH_BYTES} bytes with {_NAME_BYTES} for each name in it: {shortened(path)}"
        )
    return path


PathOrName = Annotated[str, Field(min_length=1), AfterValidator(_check_path)]
"""A path, with `~` as the home directory, or the name of something on the hub or built in."""
