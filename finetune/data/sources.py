"""Sources: where rows come from. Each row knows its place, for messages that a person can follow to the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.fields import unknown
from finetune.data import python_docs
from finetune.errors import DataError, MachineError


@dataclass(frozen=True)
class Row:
    """One record: its fields, and where it stands (`train.jsonl:12`)."""

    place: str
    fields: dict[str, Any]


Rows = Iterator[Row]

# Tokenized in some seconds.
_SMALL_BYTES = 16 * 2**20


def rows(source: str, split: str = "train") -> Rows:
    """The rows of `source`: a built-in, a local file or a hub data set.

    Raises DataError for a missing, unreadable or malformed file with file:line:column; MachineError when a hub data
    set cannot be fetched.
    """
    if source.startswith("builtin:"):
        return _builtin(source, split)
    path = Path(source)
    if path.is_dir():
        raise DataError(f"{source}: is a directory; give one file ending in {', '.join(READERS)}")
    if path.suffix in READERS:
        if not path.is_file():
            raise DataError(f"{source}: no such file{_nearest(path)}")
        return READERS[path.suffix](path)
    if path.exists():
        raise DataError(f"{source}: expected a file ending in {', '.join(READERS)}")
    return _hub(source, split)


def at_hand(source: str) -> bool:
    """Whether the source can be read in seconds and without a network: a built-in, or a local file of no great size."""
    path = Path(source)
    return source in BUILTIN or (path.is_file() and path.stat().st_size <= _SMALL_BYTES)


def has_held_out_split(source: str) -> bool:
    """Whether the source keeps its own held-out rows, under the split name `eval`."""
    return source in BUILTIN


def _builtin(source: str, split: str) -> Rows:
    if source not in BUILTIN:
        raise DataError(f"data source {unknown(source, BUILTIN)}")
    for index, fields in enumerate(BUILTIN[source](split)):
        yield Row(f"{source}[{split}]:{index + 1}", fields)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, read one at a time; a byte order mark is skipped."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"{path}:{number}: byte {error.start + 1} of the line"
                raise DataError(f"{place} is not UTF-8; convert the file") from None


def _parse_json(text: str, path: Path, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}:{line}:{error.colno}: not valid JSON: {error.msg}") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path}:{first_line}: JSON that cannot be read: {_first(error)}") from None


def _jsonl(path: Path) -> Rows:
    for number, line in _lines(path):
        if line.strip():
            # Without its line break, so that a cut line is told where it is cut and not where it ends.
            value = _parse_json(line.rstrip("\r\n"), path, number)
            if not isinstance(value, dict):
                raise DataError(f"{path}:{number}: a row must be a JSON object, with braces")
            yield Row(f"{path}:{number}", value)


def _json(path: Path) -> Rows:
    values = _parse_json("".join(line for _, line in _lines(path)), path)
    if not isinstance(values, list):
        raise DataError(f"{path}: expected a list of objects; for one object a line, name the file .jsonl")
    for index, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise DataError(f"{path}: item {index} must be a JSON object")
        yield Row(f"{path}[{index}]", value)


def _csv(path: Path) -> Rows:
    # A cell may hold a whole document; the default limit of 128 KiB is against files that are not CSV at all.
    csv.field_size_limit(2**30)
    reader = csv.DictReader((line for _, line in _lines(path)), strict=True)
    try:
        for fields in reader:
            if None in fields:
                raise DataError(f"{path}:{reader.line_num}: more cells than the header has names")
            yield Row(f"{path}:{reader.line_num}", fields)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV: {error}") from None


def _parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        index = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                index += 1
                yield Row(f"{path}[{index}]", fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file, or a damaged one: {_first(error)}") from None


def _hub(name: str, split: str) -> Rows:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        loaded = datasets.load_dataset(name, split=split)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, HfHubHTTPError, OSError) as error:
        local = f" A local file must end in {', '.join(READERS)}." if "." in Path(name).name else ""
        raise MachineError(
            f"data set `{name}` ({split}) cannot be fetched from the hub: {_first(error)}{local}"
        ) from None
    except ValueError as error:
        raise DataError(f"data set `{name}`: {_first(error)}") from None
    for index, fields in enumerate(loaded, start=1):
        yield Row(f"{name}[{split}]:{index}", dict(fields))


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    known = sorted(str(found) for found in path.parent.iterdir() if found.suffix in READERS)
    return f"; {unknown(str(path), known)}" if known else ""


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
BUILTIN: dict[str, Callable[[Any], list[dict[str, Any]]]] = {"builtin:python_docs": python_docs.conversations}
