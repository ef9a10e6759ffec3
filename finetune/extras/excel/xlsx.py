"""Excel workbooks (.xlsx) as rows of text, read with calamine, the extra `excel`."""

from __future__ import annotations

import datetime
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from finetune.data.problems import Problems
from finetune.data.readers import Records, cell_values, refuse_repeated
from finetune.errors import DataError, MachineError, first_line

_DAY = datetime.timedelta(days=1)
_HALF_A_SECOND = datetime.timedelta(seconds=0.5)


def read(path: Path, problems: Problems, encoding: str | None = None) -> Records:
    """The rows of a workbook, whose first one names the columns; errors as in `_rows`."""
    names: dict[int, str] = {}
    header = 0
    for number, cells in _rows(path, problems):
        location = f"{path}:{number}"
        filled = {column: text for column, text in enumerate(cells) if text}
        if not names:
            names, header = filled, number
            refuse_repeated(list(names.values()), location)
        elif (columns := len(filled | names)) > len(names):
            problems.add(
                f"{location}: more cells than the header, row {header}, has columns ({columns}, not {len(names)})"
            )
        else:
            named = {name: cells[column] for column, name in names.items()}
            yield location, cell_values(named, location, problems)


def _rows(path: Path, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """The number of each row that is not empty and the text of its cells, as many in each row.

    A cell without text is added to `problems`. Raises DataError for a file that is damaged or not a workbook, and for a
    workbook with rows in several sheets; MachineError if calamine is not installed.
    """
    try:
        import python_calamine as calamine
    except ImportError:
        raise MachineError(
            f"{path}: a workbook of Excel needs the package python-calamine: pip install python-calamine; or save it "
            "as CSV"
        ) from None
    try:
        _check_parts(path, problems)
        with calamine.CalamineWorkbook.from_path(path) as workbook:
            kinds = calamine.SheetTypeEnum
            names = [sheet.name for sheet in workbook.sheets_metadata if sheet.typ == kinds.WorkSheet]
            full = [name for name in names if next(_rows_of(workbook.get_sheet_by_name(name)), None)]
            if len(full) > 1:
                raise DataError(
                    f"{path}: {len(full)} sheets have rows ({', '.join(full)}); save the one to train on as a file of "
                    "its own"
                )
            for name in full:
                yield from _rows_of(workbook.get_sheet_by_name(name))
    except (
        calamine.CalamineError, zipfile.BadZipFile, zlib.error, ElementTree.ParseError, NotImplementedError, OSError,
        EOFError, ValueError,
    ) as error:  # fmt: skip
        raise DataError(
            f"{path}: not an Excel workbook, damaged, or with a password; save it again as .xlsx without one, or as "
            f"CSV ({first_line(error)})"
        ) from None


def _check_parts(path: Path, problems: Problems) -> None:
    """Read each part to its checksum, and add the cells without text, which calamine takes for empty ones."""
    with zipfile.ZipFile(path) as archive:
        for part in archive.namelist():
            with archive.open(part) as content:
                if part.startswith("xl/worksheets/") and part.endswith(".xml"):
                    for cell, row, why in _without_text(content):
                        problems.add(f"{path}:{row}: the cell {cell} has {why}")
                while content.read(2**20):
                    pass


def _without_text(worksheet: IO[bytes]) -> Iterator[tuple[str, int, str]]:
    """Name, row and fault of each cell with an error, or with a formula that no program has computed."""
    row = column = 0
    for event, element in ElementTree.iterparse(worksheet, ("start", "end")):
        kind = element.tag.rpartition("}")[2]
        if event == "start" and kind == "row":
            row, column = int(element.get("r", row + 1)), 0
        elif event == "end" and kind == "c":
            column += 1
            parts = {part.tag.rpartition("}")[2]: part.text or "" for part in element}
            cell, type_ = element.get("r", f"{column} of the row"), element.get("t", "n")
            if type_ == "e":
                yield cell, row, f"the error {parts.get('v', '')}; repair it, or empty it"
            elif type_ == "n" and "f" in parts and not parts.get("v"):
                yield cell, row, "a formula without a result; open and save the file in Excel"
        elif event == "end" and kind == "row":
            element.clear()


def _rows_of(sheet: Any) -> Iterator[tuple[int, list[str]]]:
    for number, cells in enumerate(sheet.iter_rows(), start=1):
        texts = [_text(cell) for cell in cells]
        if any(texts):
            yield number, texts


def _text(cell: Any) -> str:
    """A cell as Excel shows it without a format: numbers to 15 digits, dates and times as in ISO 8601, to seconds."""
    if isinstance(cell, bool):
        return str(cell).upper()
    if isinstance(cell, datetime.timedelta):
        cell = cell / _DAY
    if isinstance(cell, (int, float)):
        return f"{cell:.15g}"
    if isinstance(cell, datetime.time):
        return (datetime.datetime.combine(datetime.date.min, cell) + _HALF_A_SECOND).strftime("%H:%M:%S")
    if isinstance(cell, datetime.datetime):
        moment = (cell + _HALF_A_SECOND).replace(microsecond=0)
        return str(moment if moment.time() != datetime.time() else moment.date())
    return str(cell).replace("\r\n", "\n")
