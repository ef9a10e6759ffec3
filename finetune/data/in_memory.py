"""Rows given from Python: kept in this process, under a name made of their content."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.field_types import GIVEN, source_name
from finetune.data import columnar
from finetune.data.examples import RowError
from finetune.data.fields import as_json, kind_of, plain
from finetune.errors import DataError

# Hex digits used, of 64: enough that no two sets of rows in one process share a name.
_DIGITS = 16

# Rows of a `Dataset` read at a time; each may be a whole document.
_AT_ONCE = 16


_KEPT: dict[str, tuple[Iterable[Mapping[str, Any]], int]] = {}
"""Rows by their name, and about how many bytes of text they hold."""


def given(rows: Iterable[Any], key: str) -> str:
    """Keep `rows`, each a mapping of its fields, and return their name as a source; they are the value of `key`.

    They are copied, so that a later change does not reach a run; a `datasets.Dataset`, which does not change, is not.
    Raises DataError for a row of another type, and as `fields.plain`.
    """
    if hasattr(rows, "iterrows"):
        raise DataError(f'{key}: of a pandas.DataFrame, give its rows: frame.to_dict("records")')
    datasets = sys.modules.get("datasets")  # unless it is imported, no value is one of its
    if datasets and isinstance(rows, datasets.IterableDataset):
        if rows.features is None:  # every object is taken for a struct
            rows = map(columnar.as_written, rows)
        else:
            types = {field.name: field.type for field in rows.features.arrow_schema}
            rows = (
                {name: columnar.as_written(value, types.get(name)) for name, value in row.items()}
                for row in rows.decode(False)
            )
    kept: Iterable[Mapping[str, Any]]
    if datasets and isinstance(rows, datasets.Dataset):
        kept = of_dataset(rows)
    else:
        kept = []
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f"{key}[{index}]: a row must be a dict of its fields by name, not {kind_of(row)}")
            try:
                kept.append(plain(row))
            except RowError as error:
                raise DataError(f"{key}[{index}]: {error}") from None
    digest, size_bytes = hashlib.sha256(), 0
    for row in kept:
        text = as_json(row).encode() + b"\n"
        digest.update(text)
        size_bytes += len(text)
    name = GIVEN + digest.hexdigest()[:_DIGITS]
    _KEPT[name] = kept, size_bytes
    return name


@dataclass(frozen=True)
class _StoredRows:
    """The rows of a `datasets.Dataset` as they are stored: of an image, the bytes or the path of its file."""

    stored: Any

    def __iter__(self) -> Iterator[dict[str, Any]]:
        index = 0
        columns = self.stored.format["columns"]
        for table in self.stored.with_format("arrow", columns=columns).iter(_AT_ONCE):
            yield from columnar.rows(table, f"row {index}")
            index += table.num_rows


def of_dataset(rows: Any) -> Iterable[Mapping[str, Any]]:
    """The rows of a `datasets.Dataset`, without decoding its images; those of its transform, if it has one."""
    return rows if rows.format["type"] == "custom" else _StoredRows(rows)


def is_here(name: str) -> bool:
    """Whether this process has the rows."""
    return name in _KEPT


def size_bytes(name: str) -> int:
    """The size of the rows as JSON lines. Raises DataError if this process does not have them."""
    return _find(name)[1]


def records(name: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its location, as Python writes it for the value of `key`: `data.train[0]`, `data.train[1]`, ..."""
    for index, row in enumerate(_find(name)[0]):
        yield f"{key}[{index}]", dict(row)


def _find(name: str) -> tuple[Iterable[Mapping[str, Any]], int]:
    if not is_here(name):
        raise DataError(f"{source_name(name)} are not kept on disk: run the program that gave them again")
    return _KEPT[name]
