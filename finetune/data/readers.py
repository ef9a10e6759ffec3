"""Readers: from a file to its records, one at a time. A new kind of file is one entry in a table.

`datasets` reads the same kinds of files, but without the file and line that each message here names, so it is used only
for data sets on the hub.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.data.compressed import COMPRESSIONS
from finetune.data.lines import ROW_BYTES, lines, whole
from finetune.data.problems import Problems
from finetune.data.strict_json import Decoder, JsonError, repeated
from finetune.errors import DataError, first_line

Records = Iterator[tuple[str, dict[str, Any]]]
"""Records with their place (`train.jsonl:12`, or `train.parquet[12]` where there are no lines)."""

Reader = Callable[[Path, Problems], Records]
"""Yields what is sound, notes each record that is not, and raises DataError where nothing can be read any more."""

# Rows of a column file held at a time: few enough for rows of a whole document each.
_BATCH_ROWS = 16


def reader(path: Path) -> Reader | None:
    """The reader for a file of this name, or None. Upper and lower case are the same."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return TEXT_READERS.get(before) if last in COMPRESSIONS else READERS.get(last)


def _jsonl(path: Path, problems: Problems) -> Records:
    decoder = Decoder()
    begun = False
    for number, line in lines(path, problems):
        # Without its line break, so that the error in a cut line is placed where it is cut.
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        place = f"{path}:{number}"
        if not begun and (line.startswith("[") or line.rstrip() == "{"):
            raise DataError(f"{place}: a row must be one JSON object on one line; a file that is a list is named .json")
        begun = True
        try:
            value = decoder.read(line)
        except JsonError as error:
            problems.add(f"{place}:{error.at + 1}: {error}")
            continue
        for wrong in decoder.wrong:
            problems.add(f"{place}: {wrong}")
        if isinstance(value, dict):
            yield place, value
        else:
            problems.add(f"{place}: a row must be a JSON object, with braces")


def _json(path: Path, problems: Problems) -> Records:
    decoder, text = Decoder(), whole(path, problems)

    def place(at: int) -> str:
        return f"{path}:{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"

    if not re.match(r"\s*(\[|$)", text):
        raise DataError(f"{path}: {_instead_of_a_list(text)}")
    try:
        for index, (value, start, end) in enumerate(decoder.items(text), start=1):
            if end - start > ROW_BYTES:
                raise DataError(f"{place(start)}: an item is longer than {ROW_BYTES // 2**20} MiB, which no row is")
            for wrong in decoder.wrong:
                problems.add(f"{path}[{index}]: {wrong}")
            if isinstance(value, dict):
                yield f"{path}[{index}]", value
            else:
                problems.add(f"{path}: item {index} must be a JSON object")
    except JsonError as error:
        raise DataError(f"{place(error.at)}: {error}") from None


def _instead_of_a_list(text: str) -> str:
    if key := re.match(r'\s*\{\s*"(\w+)"\s*:\s*\[', text):
        return f"expected a list of objects, not an object with `{key[1]}`; take it out with `jq .{key[1]}`"
    return "expected a list of objects; for one object a line, name the file .jsonl"


def _csv(path: Path, problems: Problems, delimiter: str = ",") -> Records:
    # A cell may hold a whole document; the default limit of 128 KiB is against files that are not CSV at all.
    csv.field_size_limit(ROW_BYTES)
    row_characters = 0

    def row_lines() -> Iterator[str]:
        nonlocal row_characters
        for _, line in lines(path, problems):
            row_characters += len(line)
            if row_characters > ROW_BYTES:
                raise DataError(f"{place}: the row that begins here is longer than {ROW_BYTES // 2**20} MiB")
            yield line

    cells = csv.reader(row_lines(), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        place, row_characters = f"{path}:{cells.line_num + 1}", 0  # where the row begins; it may go on for lines
        try:
            row = next(cells, None)
        except csv.Error as error:
            problems.add(f"{place}: not valid CSV in the row that begins here: {error}")
            continue
        if row is None:
            return
        if not row:
            continue
        if names is None:
            if twice := repeated(row):
                raise DataError(f"{place}: the header has the name `{twice}` twice; give each column its own")
            names = row
        elif len(row) != len(names):
            more = "more" if len(row) > len(names) else "fewer"
            problems.add(f"{place}: {more} cells than the header has names ({len(row)}, not {len(names)})")
        else:
            yield place, dict(zip(names, row, strict=True))


def _text(path: Path, problems: Problems) -> Records:
    for number, line in lines(path, problems):
        text = line.rstrip("\r\n")
        if number == 1 and "\r" in text and not line.endswith("\n"):
            problems.add(f"{path}:1: lines end in carriage returns alone; convert them with `tr '\\r' '\\n'`")
        if text.strip():
            yield f"{path}:{number}", {"text": text}


def _parquet(path: Path, problems: Problems) -> Records:
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        # The checksums of pages are verified where the writer left any. Read ahead, a group would be held whole.
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            # Columns are not looked at: pyarrow 26 ends the process at some damaged ones (`RowGroupMetaData.column`).
            for number, group in enumerate(map(file.metadata.row_group, range(file.metadata.num_row_groups))):
                if group.total_byte_size > ROW_BYTES * max(1, group.num_rows):  # as in a decompression bomb
                    raise DataError(f"{path}: {_TOO_LONG} (row group {number})")
            rows = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                rows += batch.num_rows
                yield batch
            if rows != file.metadata.num_rows:
                raise ValueError(f"{rows:,} rows, and its footer states {file.metadata.num_rows:,}")

    return _columnar(path, batches(), "a Parquet file")


def _arrow(path: Path, problems: Problems) -> Records:
    import pyarrow.ipc

    def batches() -> Iterator[Any]:
        with pyarrow.OSFile(str(path)) as file:
            is_file, found = file.read(6) == b"ARROW1", 0
            file.seek(0)
            listed = pyarrow.ipc.open_file(file).num_record_batches if is_file else None
            file.seek(8 if is_file else 0)
            # An Arrow file holds a stream between its first 8 bytes and its footer.
            stream = pyarrow.ipc.open_stream(file)
            end = file.tell()
            for batch in stream:
                end = file.tell()
                found += 1
                yield batch
            # A stream ends with a marker; without it, the file was cut off between two batches.
            if file.tell() == end:
                raise ValueError("cut off: it has no end-of-stream mark")
            if listed is None and file.tell() < file.size():
                raise ValueError(f"{file.size() - file.tell():,} bytes behind its end-of-stream mark")
            if listed not in (None, found):
                raise ValueError(f"{found} batches, and its footer states {listed}")

    return _columnar(path, batches(), "an Arrow file or stream")


_TOO_LONG = f"a row takes more than {ROW_BYTES // 2**20} MiB, which no row does"


def _columnar(path: Path, batches: Iterator[Any], kind: str) -> Records:
    import pyarrow

    index = 0
    try:
        for batch in batches:
            if twice := repeated(batch.schema.names):
                raise DataError(f"{path}: two columns have the name `{twice}`; rename one")
            batch.validate(full=True)  # damaged offsets would otherwise be followed out of the buffer
            for rows in _slices(batch):
                if rows.num_rows == 1 and sum(map(_size_bytes, rows.columns)) > ROW_BYTES:
                    raise DataError(f"{path}[{index + 1}]: {_TOO_LONG}")
                for fields in _fields(rows, f"{path}[{index + 1}]"):
                    index += 1
                    yield f"{path}[{index}]", fields
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        after = f" after row {index}" if index else ""
        raise DataError(
            f"{path}: not {kind}, or damaged{after}; make or fetch it again ({first_line(error)})"
        ) from None


def _slices(batch: Any) -> Iterator[Any]:
    """A batch in parts whose rows take about `ROW_BYTES`, even if each has the longest value of a dictionary."""
    start = 0
    while start < batch.num_rows:
        part = batch.slice(start, _BATCH_ROWS)
        part = part.slice(0, max(1, ROW_BYTES // max(1, part.nbytes)))
        yield part
        start += part.num_rows


def _size_bytes(array: Any) -> int:
    """Bytes of the values themselves; those of a dictionary or a view share buffers with many rows."""
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


def _fields(rows: Any, place: str) -> list[dict[str, Any]]:
    """The rows as Python has them; a date or time that Python has not, such as year 10000, as its text."""
    import pyarrow

    columns = {}
    for name in rows.schema.names:
        column = rows.column(name)
        try:
            columns[name] = column.to_pylist()
        except (ArithmeticError, LookupError, ValueError) as error:
            try:
                columns[name] = column.cast(pyarrow.string()).to_pylist()
            except pyarrow.ArrowException:
                raise DataError(
                    f"{place}: the column `{name}` ({column.type}) has a value here or close behind that Python "
                    f"cannot hold: {error}; leave the column out, or mend it"
                ) from None
    if not columns:  # as a damaged file may have it; its rows are none the fewer
        return [{} for _ in range(rows.num_rows)]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


TEXT_READERS: dict[str, Reader] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": functools.partial(_csv, delimiter="\t"),
    ".txt": _text,
}
"""By the ending of a file, which an ending of `COMPRESSIONS` may follow."""

READERS: dict[str, Reader] = {**TEXT_READERS, ".parquet": _parquet, ".arrow": _arrow}

ENDINGS = f"{', '.join(READERS)}, the text files also with {', '.join(COMPRESSIONS)}"
"""For messages."""
