"""Excel workbooks (.xlsx, ECMA-376) as rows of text, read with the standard library.

A workbook is a ZIP archive of XML. Training needs only the text of the cells of one sheet. A library would be another
dependency, and the existing ones hold whole sheets in memory or trust a hostile file. Parts are streamed, of bounded
size and without document types, so that no entity is expanded.
"""

from __future__ import annotations

import datetime
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.parsers import expat

from finetune.data.lines import ROW_BYTES
from finetune.data.problems import Problems
from finetune.errors import DataError, first_line

Attributes = dict[str, str]

# Excel's own limits.
_MOST_ROWS, _MOST_COLUMNS = 2**20, 2**14
# The largest size of an unpacked part: of a sheet, which is streamed, and of other parts, which are held in memory.
_SHEET_BYTES, _PART_BYTES = 2**32, 2**28
_PIECE_BYTES = 2**16

_OLE = b"\xd0\xcf\x11\xe0"  # .xls, and any workbook with a password
_ESCAPE = re.compile("_x([0-9A-Fa-f]{4})_")
_CELL = re.compile(r"([A-Z]{1,3})([1-9]\d{0,6})")
_NUMBER = re.compile(r"-?\d{1,15}")
# Number formats (18.8.30): those that stand for dates and times by their number, and what is literal in a code.
_DATES = frozenset({*range(14, 23), *range(27, 37), 45, 47, *range(50, 59)})
_LITERAL = re.compile(r'"[^"]*"|\\.|_.|\*.|\[[^\]]*\]')
_DAMAGE = (
    expat.ExpatError, zipfile.BadZipFile, zlib.error, EOFError, LookupError, NotImplementedError, OSError,
    OverflowError, RuntimeError, ValueError,
)  # fmt: skip


def cells(path: Path, problems: Problems) -> Iterator[tuple[int, dict[int, str]]]:
    """The number of each row and the text of its cells that are not empty, by the number of their column from 1.

    A cell that has no text is added to `problems`. Raises DataError for a file that is damaged or not a workbook, and
    for a workbook with rows in several sheets.
    """
    try:
        with open(path, "rb") as file:
            if file.read(4) == _OLE:
                raise DataError(f"{path}: an old .xls workbook, or one with a password; save it as .xlsx without one")
        with zipfile.ZipFile(path) as archive:
            yield from _Workbook(path, archive, problems).rows()
    except _DAMAGE as error:
        raise DataError(
            f"{path}: not an Excel workbook, or damaged; save it again as .xlsx, or as CSV ({first_line(error)})"
        ) from None


@dataclass
class _Workbook:
    path: Path
    archive: zipfile.ZipFile
    problems: Problems

    def rows(self) -> Iterator[tuple[int, dict[int, str]]]:
        """The rows of the only sheet that has any."""
        main = next((target for kind, _, target in self._related("") if kind == "officeDocument"), None)
        if main is None:
            raise ValueError("it has no workbook")
        sheets, since_1904 = self._sheets(main)
        related = {kind: target for kind, _, target in self._related(main)}
        strings = self._strings(related["sharedStrings"]) if "sharedStrings" in related else []
        dates = self._date_styles(related["styles"]) if "styles" in related else frozenset()

        def read(part: str) -> Iterator[tuple[int, dict[int, str]]]:
            return self._rows_of(part, strings, dates, since_1904)

        full = [name for name, part in sheets.items() if next(read(part), None)]
        if len(full) > 1:
            raise DataError(
                f"{self.path}: {len(full)} sheets have rows ({', '.join(full)}); save the one to train on as a file of "
                "its own"
            )
        for name in full:
            yield from read(sheets[name])

    def _related(self, part: str) -> Iterator[tuple[str, str, str]]:
        """(kind, identifier, name) of each part that `part` refers to; of the whole package if it is empty."""
        folder, name = posixpath.split(part)
        for start, tag, attributes, _ in self._elements(posixpath.join(folder, "_rels", f"{name}.rels")):
            if start and tag == "Relationship" and attributes.get("TargetMode") != "External":
                target = posixpath.normpath(posixpath.join("/", folder, attributes["Target"])).lstrip("/")
                yield attributes["Type"].rpartition("/")[2], attributes["Id"], target

    def _sheets(self, main: str) -> tuple[dict[str, str], bool]:
        """The parts of the worksheets by name, hidden ones too, and whether dates count from 1904."""
        worksheets = {id: target for kind, id, target in self._related(main) if kind == "worksheet"}
        sheets, since_1904 = {}, False
        for start, tag, attributes, _ in self._elements(main):
            if start and tag == "sheet" and attributes["id"] in worksheets:
                sheets[attributes["name"]] = worksheets[attributes["id"]]
            elif start and tag == "workbookPr":
                since_1904 = attributes.get("date1904") in ("1", "true")
        return sheets, since_1904

    def _strings(self, part: str) -> list[str]:
        texts: list[str] = []
        text, phonetic = "", False
        for start, tag, _, content in self._elements(part):
            if tag == "rPh":  # how a Japanese text is pronounced
                phonetic = start
            elif tag == "t" and not start and not phonetic:
                text += content
            elif tag == "si" and not start:
                texts.append(_plain(text))
                text = ""
        return texts

    def _date_styles(self, part: str) -> frozenset[int]:
        """The styles of cells whose numbers stand for dates or times."""
        dates, date_styles, styles, inside = set(_DATES), set(), 0, False
        for start, tag, attributes, _ in self._elements(part):
            if tag == "cellXfs":
                inside = start
            elif start and tag == "numFmt":
                code = _LITERAL.sub("", attributes["formatCode"]).lower()
                elapsed = re.search(r"\[(h+|m+|s+)\]", attributes["formatCode"].lower())
                number = int(attributes["numFmtId"])
                dates.discard(number)
                if set(code) & set("dmyhs") and not elapsed:
                    dates.add(number)
            elif start and tag == "xf" and inside:
                date_styles |= {styles} if int(attributes.get("numFmtId", 0)) in dates else set()
                styles += 1
        return frozenset(date_styles)

    def _rows_of(
        self, part: str, strings: list[str], dates: frozenset[int], since_1904: bool
    ) -> Iterator[tuple[int, dict[int, str]]]:
        number = column = characters = 0
        row: dict[int, str] = {}
        cell = _Cell(0, 0, {})
        for start, tag, attributes, content in self._elements(part, _SHEET_BYTES):
            if tag not in ("row", "c"):
                cell.read(start, tag, content)
            elif tag == "row" and start:
                number, column, characters, row = _next_row(attributes, number), 0, 0, {}
            elif tag == "row":
                if row:
                    yield number, row
            elif start:
                column = _next_column(attributes, column, number)
                cell = _Cell(number, column, attributes)
            elif value := self._text_of(cell, strings, dates, since_1904):
                row[column] = value
                characters += len(value)
                if characters > ROW_BYTES:
                    raise DataError(f"{self.path}:{number}: the row is longer than {ROW_BYTES // 2**20} MiB")

    def _text_of(self, cell: _Cell, strings: list[str], dates: frozenset[int], since_1904: bool) -> str:
        kind, value = cell.attributes.get("t", "n"), cell.value
        location = f"{self.path}:{cell.row}: the cell {cell.attributes.get('r', f'in column {cell.column}')}"
        if kind == "e":
            self.problems.add(f"{location} has the error {value}; repair it, or empty it")
        elif cell.formula and kind == "n" and not value:
            self.problems.add(f"{location} has a formula without a result; open and save the file in Excel")
        elif kind == "s":
            if int(value) < 0:
                raise IndexError(f"the shared text {value}")
            return strings[int(value)]
        elif kind in ("inlineStr", "str"):
            return _plain(cell.inline if kind == "inlineStr" else value)
        elif kind == "b":
            return "TRUE" if value == "1" else "FALSE"
        elif kind == "n" and value:
            is_date = int(cell.attributes.get("s", 0)) in dates
            return _date(float(value), since_1904) if is_date else _number(value)
        return value

    def _elements(self, part: str, limit: int | None = None) -> Iterator[tuple[bool, str, Attributes, str]]:
        """Each start of an element with its attributes, and each end with the text before it; names without prefixes.

        Raises one of `_DAMAGE` for XML that is not valid or has a document type, and for a part over `limit` bytes, by
        default `_PART_BYTES`.
        """
        parser = expat.ParserCreate(namespace_separator="}")
        events: list[tuple[bool, str, Attributes, str]] = []
        texts: list[str] = []

        def start(tag: str, attributes: Attributes) -> None:
            texts.clear()
            local = {name.rpartition("}")[2]: value for name, value in attributes.items()}
            events.append((True, tag.rpartition("}")[2], local, ""))

        def end(tag: str) -> None:
            events.append((False, tag.rpartition("}")[2], {}, "".join(texts)))
            texts.clear()

        def refuse(*_: object) -> None:
            raise ValueError("it has a document type")

        parser.StartElementHandler, parser.EndElementHandler = start, end
        parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = texts.append, refuse
        size = 0
        with self.archive.open(part) as file:
            while piece := file.read(_PIECE_BYTES):
                size += len(piece)
                if size > (limit or _PART_BYTES) or sum(map(len, texts)) > ROW_BYTES:
                    raise ValueError(f"{part} is too large")
                parser.Parse(piece)
                yield from events
                events.clear()
        parser.Parse(b"", True)
        yield from events


@dataclass
class _Cell:
    """A cell, in which the elements inside it are collected."""

    row: int
    column: int
    attributes: Attributes
    value: str = ""
    inline: str = ""
    formula: bool = False
    phonetic: bool = False

    def read(self, start: bool, tag: str, content: str) -> None:
        if tag == "f":
            self.formula = True
        elif tag == "rPh":
            self.phonetic = start
        elif tag == "v" and not start:
            self.value = content
        elif tag == "t" and not start and not self.phonetic:
            self.inline += content


def _next_row(attributes: Attributes, before: int) -> int:
    number = int(attributes.get("r", before + 1))
    if not before < number <= _MOST_ROWS:
        raise ValueError(f"row {number} after row {before}")
    return number


def _next_column(attributes: Attributes, before: int, row: int) -> int:
    column = _column(attributes["r"], row) if "r" in attributes else before + 1
    if not before < column <= _MOST_COLUMNS:
        raise ValueError(f"column {column} after column {before} in row {row}")
    return column


def _column(cell: str, row: int) -> int:
    """The number of a column, from 1, by the name of its cell in that row, such as AB12."""
    match = _CELL.fullmatch(cell)
    if not match or int(match[2]) != row:
        raise ValueError(f"the cell {cell} in row {row}")
    number = 0
    for letter in match[1]:
        number = 26 * number + ord(letter) - ord("A") + 1
    return number


def _plain(text: str) -> str:
    """A text with its escaped characters (22.9.2.19) and the line breaks of other systems replaced."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text).replace("\r\n", "\n") if "_x" in text else text


def _number(value: str) -> str:
    """A number as Excel shows it without a format, to 15 digits."""
    return value if _NUMBER.fullmatch(value) else f"{float(value):.15g}"


def _date(serial: float, since_1904: bool) -> str:
    """A date, a time, or both, as in ISO 8601, by the number of days since the workbook's first day."""
    seconds = round(serial * 86400)
    if seconds < 86400 and not since_1904:
        return str(datetime.timedelta(seconds=seconds)).rjust(8, "0") if seconds >= 0 else _number(str(serial))
    # Excel treats 1900 as a leap year, like Lotus 1-2-3.
    first = datetime.datetime(1904, 1, 1) if since_1904 else datetime.datetime(1899, 12, 31 if serial < 60 else 30)
    moment = first + datetime.timedelta(seconds=seconds)
    return moment.date().isoformat() if moment.time() == datetime.time() else moment.isoformat(" ")
