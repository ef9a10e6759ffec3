"""Excel workbooks for tests, with the parts and attributes that Excel writes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_RELATED = "http://schemas.openxmlformats.org/package/2006/relationships"

# Style 1 is a date, 2 a date of a format of one's own, 3 a percentage, 4 hours that add up, 5 a time.
_STYLES = (
    f'<styleSheet xmlns="{_MAIN}"><numFmts count="2"><numFmt numFmtId="164" formatCode="dd/mm/yyyy\\ hh:mm"/>'
    '<numFmt numFmtId="165" formatCode="[h]:mm"/></numFmts><cellStyleXfs count="1"><xf numFmtId="14"/></cellStyleXfs>'
    '<cellXfs count="6"><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="164"/><xf numFmtId="9"/>'
    '<xf numFmtId="165"/><xf numFmtId="20"/></cellXfs></styleSheet>'
)


class Xml(str):
    """A cell as it stands in the file, with `{}` for its name."""


Cell = str | int | float | Xml | None


def letters(column: int) -> str:
    """The name of a column, counted from 1."""
    name = ""
    while column:
        column, letter = divmod(column - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def write(
    path: Path, sheets: Mapping[str, Sequence[Sequence[Cell]]], *, since_1904: bool = False,
    parts: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write a workbook whose texts are shared strings; None leaves a cell out, and `parts` replaces parts."""
    shared: dict[str, int] = {}
    found = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
        "_rels/.rels": _relationships({"rId1": ("officeDocument", "xl/workbook.xml")}),
        "xl/workbook.xml": _workbook(list(sheets), since_1904),
        "xl/_rels/workbook.xml.rels": _relationships(
            {f"rId{at}": ("worksheet", f"worksheets/sheet{at}.xml") for at in range(1, len(sheets) + 1)}
            | {"rId98": ("styles", "styles.xml"), "rId99": ("sharedStrings", "/xl/sharedStrings.xml")}
        ),
        "xl/styles.xml": _STYLES,
    }
    for at, rows in enumerate(sheets.values(), start=1):
        found[f"xl/worksheets/sheet{at}.xml"] = _sheet(rows, shared)
    texts = "".join(f'<si><t xml:space="preserve">{escape(text)}</t></si>' for text in shared)
    found["xl/sharedStrings.xml"] = f'<sst xmlns="{_MAIN}">{texts}</sst>'
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**found, **(parts or {})}.items():
            head = "" if content.startswith("<?xml") else '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
            archive.writestr(name, head + content)
    return path


def _relationships(targets: Mapping[str, tuple[str, str]]) -> str:
    lines = (
        f'<Relationship Id="{id}" Type="{_OFFICE}/{kind}" Target="{target}"/>' for id, (kind, target) in targets.items()
    )
    return f'<Relationships xmlns="{_RELATED}">{"".join(lines)}</Relationships>'


def _workbook(names: Sequence[str], since_1904: bool) -> str:
    sheets = "".join(
        f'<sheet name={quoteattr(name)} sheetId="{at}" r:id="rId{at}"/>' for at, name in enumerate(names, start=1)
    )
    first = '<workbookPr date1904="1"/>' if since_1904 else "<workbookPr/>"
    return f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}">{first}<sheets>{sheets}</sheets></workbook>'


def _sheet(rows: Sequence[Sequence[Cell]], shared: dict[str, int]) -> str:
    lines = []
    for number, row in enumerate(rows, start=1):
        cells = [_cell(f"{letters(at)}{number}", cell, shared) for at, cell in enumerate(row, start=1)]
        if any(cells):
            lines.append(f'<row r="{number}">{"".join(cells)}</row>')
    return f'<worksheet xmlns="{_MAIN}"><sheetData>{"".join(lines)}</sheetData></worksheet>'


def _cell(name: str, cell: Cell, shared: dict[str, int]) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Xml):
        return cell.replace("{}", name)
    if isinstance(cell, str):
        return f'<c r="{name}" t="s"><v>{shared.setdefault(cell, len(shared))}</v></c>'
    return f'<c r="{name}"><v>{cell!r}</v></c>'
