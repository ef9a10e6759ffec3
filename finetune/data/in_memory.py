"""Rows given from Python: kept in this process, under a name made of their content."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.fields import GIVEN, not_given
from finetune.data.fields import kind_of
from finetune.errors import DataError

# Of 64 hex digits: enough that no two sets of rows in one process share a name.
_DIGITS = 16


@dataclass(frozen=True)
class _Kept:
    """Rows, and about how many bytes of text they hold."""

    rows: Iterable[Mapping[str, Any]]
    size_bytes: int


_KEPT: dict[str, _Kept] = {}


def given(rows: Iterable[Any]) -> str:
    """Keep `rows`, each a mapping of its fields, and return their name as a source.

    They are copied, so that a later change does not reach a run; a `datasets.Dataset`, which does not change, is not.
    Raises DataError for a row of another type.
    """
    kept = rows if _is_dataset(rows) else copy.deepcopy(list(rows))
    digest, size_bytes = hashlib.sha256(), 0
    for number, row in enumerate(kept, start=1):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise DataError(
                f"row {number} of the rows given from Python must be a dict of its fields by name, not {kind_of(row)}"
            )
        text = json.dumps(row, sort_keys=True, default=str).encode() + b"\n"
        digest.update(text)
        size_bytes += len(text)
    name = GIVEN + digest.hexdigest()[:_DIGITS]
    _KEPT[name] = _Kept(kept, size_bytes)
    return name


def is_here(name: str) -> bool:
    """Whether this process has the rows."""
    return name in _KEPT


def size_bytes(name: str) -> int:
    """The size of the rows as JSON lines. Raises DataError if this process does not have them."""
    return _find(name).size_bytes


def records(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its place, numbered from 1. Raises DataError if this process does not have them."""
    for number, row in enumerate(_find(name).rows, start=1):
        yield f"{name}:{number}", dict(row)


def _find(name: str) -> _Kept:
    if not is_here(name):
        raise DataError(not_given(name))
    return _KEPT[name]


def _is_dataset(rows: Any) -> bool:
    datasets = sys.modules.get("datasets")  # where it is not imported, nothing is one
    return datasets is not None and isinstance(rows, datasets.Dataset)
