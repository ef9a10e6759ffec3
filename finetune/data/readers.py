"""File readers that yield one record at a time. A new file type is one entry in READERS or TEXT_READERS.

`datasets` reads the same file types, but its errors do not name file and line, so it is used only for data sets on the
hub.
"""

from __future__ import annotations

import csv
import functools
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from finetune import tables
from finetune.data import columnar, other_json
from finetune.data.compressed import COMPRESSIONS, UNREAD
from finetune.data.lines import ROW_BYTES, lines, whole
from finetune.data.problems import Problems
from finetune.data.strict_json import Decoder, JsonError, repeated
from finetune.errors import DataError, first_line

Records = Iterator[tuple[str, dict[str, Any]]]
"""Records with their location (`train.jsonl:12`, or `train.parquet[12]` in files without lines)."""


class Reader(Protocol):
    """Yields valid records and adds a problem for each invalid one; `encoding` is for text that is not UTF-8."""

    def __call__(self, path: Path, problems: Problems, encoding: str | None = None) -> Records: ...


# Rows of a columnar file held in memory at a time; each may be a whole document.
_BATCH_ROWS = 16


def reader(path: Path) -> Reader | None:
    """The reader for a file of this name, or None. Extensions are case-insensitive."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return TEXT_READERS.get(before) if last in (*COMPRESSIONS, *UNREAD) else READERS.get(last)


def _jsonl(path: Path, problems: Problems, encoding: str | None = None) -> Records:
    decoder = Decoder()
    begun = False
    for number, line in lines(path, problems, encoding):
        # The line break is removed, so that the error in a truncated line points to where it was cut off.
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        location = f"{path}:{number}"
        if not begun and (line.startswith("[") or line.rstrip() == "{"):
            raise DataError(
                f"{location}: a row must be one JSON object on one line; name a file that holds a list .json"
            )
        begun = True
        try:
            value = decoder.read(line)
        except JsonError as error:
            problems.add(f"{location}:{error.at + 1}: {error}")
            continue
        for wrong in decoder.wrong:
            problems.add(f"{location}: {wrong}")
        if isinstance(value, dict):
            yield location, value
        else:
            problems.add(f"{location}: a row must be a JSON object in braces")


def _json(path: Path, problems: Problems, encoding: str | None = None) -> Records:
    decoder, text = Decoder(), whole(path, problems, encoding)

    def location(at: int) -> str:
        return f"{path}:{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"

    if not re.match(r"\s*(\[|$)", text):
        raise DataError(f"{path}: {other_json.advice(text)}")
    try:
        for index, (value, start, end) in enumerate(decoder.items(text), start=1):
            if end - start > ROW_BYTES:
                raise DataError(
                    f"{location(start)}: an item is longer than {ROW_BYTES // 2**20} MiB, the limit for a row"
                )
            for wrong in decoder.wrong:
                problems.add(f"{path}[{index}]: {wrong}")
            if isinstance(value, dict):
                yield f"{path}[{index}]", value
            else:
                problems.add(f"{path}: item {index} must be a JSON object")
    except JsonError as error:
        raise DataError(f"{location(error.at)}: {error}") from None


NO_HEADER = (
    "The first line was taken for the names of the columns; if it is a row, the file has no header line: begin it with "
    "the columns' names, such as `prompt` and `completion`"
)
"""For messages about columns of files where the first line names them."""


def has_header(location: str) -> bool:
    """Whether the fields of the row at `location` have their names from the first line of its file."""
    read = reader(Path(location.rpartition(":")[0]))
    return getattr(read, "func", read) in HEADED


def refuse_repeated(names: list[str], location: str) -> None:
    """Raise DataError for a table with two columns of one name."""
    if twice := repeated(names):
        raise DataError(f"{location}: two columns have the name `{twice}`; rename one. {NO_HEADER}")


_DELIMITERS = (",", ";", "\t", "|")

_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
_PRINTED = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")  # a list of messages, by Python

# The first line of a CSV file for Excel may name its delimiter.
_NAMED_DELIMITER = re.compile(r"sep=(.)\r?\n")


def _delimiter(kept: deque[str], rest: Iterator[str], usual: str) -> str:
    """The delimiter that the first line of `kept` names, which is removed; else the one that makes most columns.

    Columns of the header count where the next row has as many cells; if none does, the `usual` delimiter is taken.
    """
    if kept and (named := _NAMED_DELIMITER.fullmatch(kept[0])):
        kept.clear()
        return named[1]
    characters = sum(map(len, kept))

    def ahead() -> Iterator[str]:
        nonlocal characters
        yield from list(kept)
        while characters <= ROW_BYTES and (line := next(rest, "")):
            kept.append(line)
            characters += len(line)
            yield line

    even: dict[str, int] = {}
    uneven: dict[str, int] = {}
    for each in dict.fromkeys((usual, *_DELIMITERS)):
        rows = filter(None, csv.reader(ahead(), delimiter=each, strict=True))
        try:
            names, row = next(rows, []), next(rows, None)
        except csv.Error:
            continue
        if len(names) > 1 and (row is None or len(row) == len(names)):
            even[each] = len(names)
        elif len(names) > 1 and row and len(row) > 1:  # a broken row, which is reported with the right number of cells
            uneven[each] = len(names)
    columns = even or uneven
    return max(columns, key=columns.__getitem__, default=usual)


def _csv(path: Path, problems: Problems, encoding: str | None = None, *, delimiter: str = ",") -> Records:
    # A cell may hold a whole document; the default limit of 128 KiB is meant to catch files that are not CSV.
    csv.field_size_limit(ROW_BYTES)
    row_characters = 0
    rest = (line for _, line in lines(path, problems, encoding))
    kept = deque(islice(rest, 1))
    delimiter = _delimiter(kept, rest, delimiter)
    skipped = 0 if kept else 1  # a line that named the delimiter

    def row_lines() -> Iterator[str]:
        nonlocal row_characters
        while line := kept.popleft() if kept else next(rest, ""):
            row_characters += len(line)
            if row_characters > ROW_BYTES:
                raise DataError(f"{location}: the row that begins here is longer than {ROW_BYTES // 2**20} MiB")
            yield line

    cells = csv.reader(row_lines(), delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        # Where the row begins; it may span several lines.
        location, row_characters = f"{path}:{cells.line_num + skipped + 1}", 0
        try:
            row = next(cells, None)
        except csv.Error as error:
            problems.add(f"{location}: not valid CSV in the row that begins here: {error}")
            continue
        if row is None:
            return
        if row and not names:
            names = row
            refuse_repeated(names, location)
        elif row and len(row) != len(names):
            more = "more" if len(row) > len(names) else "fewer"
            problems.add(f"{location}: {more} cells than the header has columns ({len(row)}, not {len(names)})")
        elif row:
            yield location, cell_values(dict(zip(names, row, strict=True)), location, problems)


def cell_values(texts: dict[str, str], location: str, problems: Problems) -> dict[str, Any]:
    """The cells of a row of a table: the messages that one holds as JSON, or its text."""
    cells: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        if _PRINTED.match(text):
            problems.add(f"{location}: `{name}` is a list of messages as Python prints it; write it with `json.dumps`")
        if not _LIST_OF_OBJECTS.match(text):
            continue
        try:
            values = Decoder().read_strictly(text)
        except JsonError:
            continue
        keys = [each.keys() for each in values if isinstance(each, dict)]
        are_messages = all(each >= {"from", "value"} or ("role" in each and len(each) > 1) for each in keys)
        if are_messages and len(keys) == len(values):
            cells[name] = values
    return cells


def _text(path: Path, problems: Problems, encoding: str | None = None) -> Records:
    for number, line in lines(path, problems, encoding):
        text = line.rstrip("\r\n")
        if number == 1 and "\r" in text and not line.endswith("\n"):
            problems.add(f"{path}:1: lines end in bare carriage returns; convert them with `tr '\\r' '\\n'`")
        if text.strip():
            yield f"{path}:{number}", {"text": text}


def _parquet(path: Path, problems: Problems, encoding: str | None = None) -> Records:
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        # Page checksums are verified if the writer stored any. With `pre_buffer` a whole row group would be held.
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            # Column metadata is not read: pyarrow 26 crashes on some damaged files (`RowGroupMetaData.column`).
            for number, group in enumerate(map(file.metadata.row_group, range(file.metadata.num_row_groups))):
                if group.total_byte_size > ROW_BYTES * max(1, group.num_rows):  # a decompression bomb
                    raise DataError(f"{path}: {_TOO_LONG} (row group {number})")
            rows = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                rows += batch.num_rows
                yield batch
            if rows != file.metadata.num_rows:
                raise ValueError(f"{rows:,} rows, but its footer states {file.metadata.num_rows:,}")

    return _columnar(path, batches(), "a Parquet file")


def _arrow(path: Path, problems: Problems, encoding: str | None = None) -> Records:
    import pyarrow.ipc

    def batches() -> Iterator[Any]:
        with pyarrow.OSFile(str(path)) as file:
            is_file, batches = file.read(6) == b"ARROW1", 0
            file.seek(0)
            listed = pyarrow.ipc.open_file(file).num_record_batches if is_file else None
            file.seek(8 if is_file else 0)
            # An Arrow file holds a stream between its first 8 bytes and its footer.
            stream = pyarrow.ipc.open_stream(file)
            end = file.tell()
            for batch in stream:
                end = file.tell()
                batches += 1
                yield batch
            # A stream ends with a marker; without it, the file was cut off between two batches.
            if file.tell() == end:
                raise ValueError("cut off: it has no end-of-stream marker")
            if listed is None and file.tell() < file.size():
                raise ValueError(f"{file.size() - file.tell():,} bytes after its end-of-stream marker")
            if listed not in (None, batches):
                raise ValueError(f"{batches} batches, but its footer states {listed}")

    return _columnar(path, batches(), "an Arrow file or stream")


_TOO_LONG = f"a row takes more than {ROW_BYTES // 2**20} MiB, the limit for a row"


def _columnar(path: Path, batches: Iterator[Any], kind: str) -> Records:
    import pyarrow

    index = 0
    try:
        for batch in batches:
            if twice := repeated(batch.schema.names):
                raise DataError(f"{path}: two columns have the name `{twice}`; rename one")
            batch.validate(full=True)  # pyarrow would follow damaged offsets beyond the buffer
            start = 0
            while start < batch.num_rows:  # in slices of at most about ROW_BYTES, or of one row
                rows = batch.slice(start, _BATCH_ROWS)
                rows = rows.slice(0, max(1, ROW_BYTES // max(1, rows.nbytes)))
                start += rows.num_rows
                if rows.num_rows == 1 and sum(map(_size_bytes, rows.columns)) > ROW_BYTES:
                    raise DataError(f"{path}[{index + 1}]: {_TOO_LONG}")
                for fields in columnar.rows(rows, f"{path}[{index + 1}]"):
                    index += 1
                    yield f"{path}[{index}]", fields
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        after = f" after row {index}" if index else ""
        raise DataError(
            f"{path}: not {kind}, or damaged{after}; create or download it again ({first_line(error)})"
        ) from None


def _size_bytes(array: Any) -> int:
    """Bytes of the values themselves: dictionary and view arrays share their buffers among many rows."""
    import pyarrow.types as kinds

    kind = array.type
    if kinds.is_dictionary(kind):
        return _size_bytes(array.dictionary_decode())
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return _size_bytes(array.flatten())
    if kinds.is_struct(kind):
        return sum(map(_size_bytes, array.flatten()))
    if kinds.is_string_view(kind) or kinds.is_binary_view(kind):
        return _size_bytes(array.cast("large_binary"))
    return int(array.nbytes)


TEXT_READERS: dict[str, Reader] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": functools.partial(_csv, delimiter="\t"),
    ".txt": _text,
}
"""By file extension, which an extension of `COMPRESSIONS` may follow."""

READERS: dict[str, Reader] = {
    **TEXT_READERS,
    ".parquet": _parquet,
    ".arrow": _arrow,
}

HEADED: list[Any] = [_csv]
"""The readers of tables, in which the first line names the columns."""


def endings() -> str:
    """The endings of files that are read, for messages: those of text first, then tables, then columns."""
    names = sorted(READERS, key=lambda ending: 0 if ending in TEXT_READERS else 1 if READERS[ending] in HEADED else 2)
    return f"{', '.join(names)}, the text files also with {', '.join(COMPRESSIONS)}"


tables.complete(__name__)
