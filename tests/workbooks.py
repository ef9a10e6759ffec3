"""Excel workbooks for tests, with the parts that Excel writes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from xml.sax.saxutils import escape, quoteattr

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_RELATED = "http://schemas.openxmlformats.org/package/2006/relationships"

# Style 1 is a date, 2 a date of a format of one's own, 3 a percentage, 4 hours that add up, 5 a time.
_STYLES = (
    f'<styleSheet xmlns="{_MAIN}"><numFmts count="2"><numFmt numFmtId="164" formatCode="dd/mm/yyyy\\ hh:mm"/>'
    '<numFmt numFmtId="165" formatCode="[h]:mm"/></numFmts><cellXfs count="6"><xf numFmtId="0"/><xf numFmtId="14"/>'
    '<xf numFmtId="164"/><xf numFmtId="9"/><xf numFmtId="165"/><xf numFmtId="20"/></cellXfs></styleSheet>'
)


class Xml(str):
    """A cell as it stands in the file, with `{}` for its name."""


Cell = str | int | float | Xml | None


def write(path: Path, sheets: Mapping[str, Sequence[Sequence[Cell]]], *, first_day: str = "") -> Path:
    """Write a workbook of up to 26 columns; None leaves a cell out, and `first_day` is an attribute for dates."""
    shared: dict[str, int] = {}

    def cell(name: str, value: Cell) -> str:
        if value is None or isinstance(value, Xml):
            return (value or "").replace("{}", name)
        if isinstance(value, str):
            return f'<c r="{name}" t="s"><v>{shared.setdefault(value, len(shared))}</v></c>'
        return f'<c r="{name}"><v>{value!r}</v></c>'

    parts, listed, targets = {}, "", {"styles.xml": "styles", "sharedStrings.xml": "sharedStrings"}
    for at, (title, rows) in enumerate(sheets.items(), start=1):
        lines = [
            "".join(cell(f"{column}{number}", value) for column, value in zip(ascii_uppercase, row, strict=False))
            for number, row in enumerate(rows, start=1)
        ]
        rows_xml = "".join(f'<row r="{number}">{line}</row>' for number, line in enumerate(lines, start=1) if line)
        parts[f"xl/worksheets/sheet{at}.xml"] = (
            f'<worksheet xmlns="{_MAIN}"><sheetData>{rows_xml}</sheetData></worksheet>'
        )
        targets[f"worksheets/sheet{at}.xml"] = "worksheet"
        listed += f'<sheet name={quoteattr(title)} sheetId="{at}" r:id="rId{len(targets)}"/>'
    texts = "".join(f'<si><t xml:space="preserve">{escape(text)}</t></si>' for text in shared)
    parts |= {
        "_rels/.rels": _relationships({"xl/workbook.xml": "officeDocument"}),
        "xl/_rels/workbook.xml.rels": _relationships(targets),
        "xl/workbook.xml": (
            f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><workbookPr {first_day}/>'
            f"<sheets>{listed}</sheets></workbook>"
        ),
        "xl/styles.xml": _STYLES,
        "xl/sharedStrings.xml": f'<sst xmlns="{_MAIN}">{texts}</sst>',
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n{content}')
    return path


def _relationships(targets: Mapping[str, str]) -> str:
    lines = (
        f'<Relationship Id="rId{at}" Type="{_OFFICE}/{kind}" Target="{target}"/>'
        for at, (target, kind) in enumerate(targets.items(), start=1)
    )
    return f'<Relationships xmlns="{_RELATED}">{"".join(lines)}</Relationships>'
