"""Readers: from a file to its records, one at a time. A new kind of file is one entry in a table."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.data.lines import COMPRESSIONS, ROW_BYTES, lines, pieces
from finetune.data.problems import Problems
from finetune.data.strict_json import Decoder, JsonError, ListReader
from finetune.errors import DataError

Records = Iterator[tuple[str, dict[str, Any]]]
"""Records with their place (`train.jsonl:12`, or `train.parquet[12]` where there are no lines)."""

Reader = Callable[[Path, Problems], Records]
"""Yields what is sound, notes each record that is not, and raises DataError where nothing can be read any more."""

# Rows of a column file held at a time, few enough for rows of a whole document each.
_BATCH_ROWS = 64


def reader(path: Path) -> Reader | None:
    """The reader for a file of this name, or None."""
    if path.suffix in COMPRESSIONS:
        return TEXT_READERS.get(path.with_suffix("").suffix)
    return READERS.get(path.suffix)


def _jsonl(path: Path, problems: Problems) -> Records:
    decoder = Decoder()
    begun = False
    for number, line in lines(path, problems):
        # Without its line break, so that a cut line is told where it is cut and not where it ends.
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
    for index, (value, wrong) in enumerate(ListReader(path, pieces(path, problems), ROW_BYTES).items(), start=1):
        place = f"{path}[{index}]"
        for what in wrong:
            problems.add(f"{place}: {what}")
        if isinstance(value, dict):
            yield place, value
        else:
            problems.add(f"{path}: item {index} must be a JSON object")


def _csv(path: Path, problems: Problems, delimiter: str = ",") -> Records:
    # A cell may hold a whole document; the default limit of 128 KiB is against files that are not CSV at all.
    csv.field_size_limit(ROW_BYTES)
    cells = csv.reader((line for _, line in lines(path, problems)), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        place = f"{path}:{cells.line_num + 1}"  # where the row begins; it may go on for lines
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
            names = _header(row, place)
        elif len(row) != len(names):
            more = "more" if len(row) > len(names) else "fewer"
            problems.add(f"{place}: {more} cells than the header has names ({len(row)}, not {len(names)})")
        else:
            yield place, dict(zip(names, row, strict=True))


def _header(names: list[str], place: str) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{place}: the header has the name `{name}` twice; give each column its own")
    return names


def _tsv(path: Path, problems: Problems) -> Records:
    return _csv(path, problems, delimiter="\t")


def _text(path: Path, problems: Problems) -> Records:
    for number, line in lines(path, problems):
        line = line.rstrip("\r\n")
        if line.strip():
            yield f"{path}:{number}", {"text": line}


def _parquet(path: Path, problems: Problems) -> Records:
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_BATCH_ROWS)

    return _columnar(path, batches(), "a Parquet file")


def _arrow(path: Path, problems: Problems) -> Records:
    import pyarrow.ipc

    def batches() -> Iterator[Any]:
        with pyarrow.OSFile(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file:
                opened = pyarrow.ipc.open_file(file)
                yield from (opened.get_batch(index) for index in range(opened.num_record_batches))
            else:
                yield from pyarrow.ipc.open_stream(file)

    return _columnar(path, batches(), "an Arrow file or stream")


def _columnar(path: Path, batches: Iterator[Any], kind: str) -> Records:
    import pyarrow

    index = 0
    try:
        for batch in batches:
            names = batch.schema.names
            if len(set(names)) < len(names):
                raise DataError(f"{path}: two columns have one name, among {', '.join(names)}; rename one")
            batch.validate(full=True)  # damaged offsets would otherwise be followed out of the buffer
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for fields in batch.slice(start, _BATCH_ROWS).to_pylist():
                    index += 1
                    yield f"{path}[{index}]", fields
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        after = f" after row {index}" if index else ""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: not {kind}, or damaged{after}; make or fetch it again ({reason})") from None


TEXT_READERS: dict[str, Reader] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".txt": _text,
}
"""By the ending of a file, which an ending of `COMPRESSIONS` may follow."""

READERS: dict[str, Reader] = {**TEXT_READERS, ".parquet": _parquet, ".arrow": _arrow}

ENDINGS = f"{', '.join(READERS)}, the text files also with {', '.join(COMPRESSIONS)}"
"""For messages."""
