"""Facts about Excel workbooks: the text of their cells is read, and a cell that has none is refused by its address."""

from __future__ import annotations

import contextlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import workbooks
from messages import refusal
from workbooks import Cell, Xml

from finetune.data import sources
from finetune.errors import DataError, MachineError


def rows(path: Path) -> list[dict[str, Any]]:
    return [row.fields for row in sources.rows(str(path))]


def refused(path: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        rows(path)
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("Grüße;\n\"so\", 🙂", "Grüße;\n\"so\", 🙂"),
        (Xml('<c r="{}" t="inlineStr"><is><r><t>in</t></r><r><t xml:space="preserve"> two</t></r></is></c>'), "in two"),
        (Xml('<c r="{}" t="inlineStr"><is><t>kanji</t><rPh sb="0" eb="1"><t>sound</t></rPh></is></c>'), "kanji"),
        (Xml('<c r="{}" t="str"><f>A1&amp;"!"</f><v>so!</v></c>'), "so!"),
        (Xml('<c r="{}" t="str"><f>""</f><v></v></c>'), ""),
        (Xml('<c r="{}" t="inlineStr"><is><t>one_x000D_\ntwo _x005F_x</t></is></c>'), "one\ntwo _x"),
        (Xml('<c r="{}" t="b"><v>1</v></c>'), "TRUE"), (Xml('<c r="{}" t="b"><v>0</v></c>'), "FALSE"),
        (42, "42"), (-7, "-7"), (0.1 + 0.2, "0.3"), (1e21, "1e+21"), (Xml('<c r="{}"><v>1E-3</v></c>'), "0.001"),
        (Xml('<c r="{}"><v>3.0</v></c>'), "3"), (Xml('<c r="{}" s="3"><v>0.5</v></c>'), "0.5"),
        (123456789012345, "123456789012345"), (Xml('<c r="{}"><f>2*3</f><v>6</v></c>'), "6"),
        (Xml('<c r="{}" s="1"><v>45292</v></c>'), "2024-01-01"),
        (Xml('<c r="{}" s="2"><v>45292.75</v></c>'), "2024-01-01 18:00:00"),
        (Xml('<c r="{}" s="2"><v>45292.0000001</v></c>'), "2024-01-01"),
        (Xml('<c r="{}" s="1"><v>61</v></c>'), "1900-03-01"), (Xml('<c r="{}" s="1"><v>59</v></c>'), "1900-02-28"),
        (Xml('<c r="{}" s="5"><v>0.3125</v></c>'), "07:30:00"), (Xml('<c r="{}" s="4"><v>1.5</v></c>'), "1.5"),
        (Xml('<c r="{}"/>'), ""), (None, ""),
    ],
)  # fmt: skip
def test_a_cell_is_read_as_text(cell: Cell, text: str, tmp_path: Path) -> None:
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": [["prompt", "completion"], ["Why?", cell]]})
    assert rows(path) == [{"prompt": "Why?", "completion": text}]


def test_sheets_empty_rows_and_old_dates_are_read_as_excel_shows_them(tmp_path: Path) -> None:
    table: list[list[Cell]] = [["a"], [Xml('<c r="{}" s="1"><v>1</v></c>')]]
    path = workbooks.write(tmp_path / "a.xlsx", {"S": table}, first_day='date1904="1"')  # of an old Mac
    assert rows(path) == [{"a": "1904-01-02"}]
    # Rows and cells that are empty are left out and count.
    table = [[], [], [None, "a", None, "b"], [], [None, None, None, "x"], [Xml('<c r="{}" s="1"/>')]]
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": table})
    [row] = sources.rows(str(path))
    assert (row.location, row.fields) == (f"{path}:5", {"a": "", "b": "x"})
    # The only sheet with rows is read, and of several none.
    table = [["text"], ["one"]]
    assert rows(workbooks.write(tmp_path / "a.xlsx", {"Empty": [], "Rows": table})) == [{"text": "one"}]
    assert rows(workbooks.write(tmp_path / "a.xlsx", {"Empty": []})) == []
    [said] = refused(workbooks.write(tmp_path / "a.xlsx", {"Train": table, "Notes & more": [["x"]]}))
    assert said.startswith("a.xlsx: 2 sheets have rows (Train, Notes & more)")


ERROR = Xml('<c r="{}" s="1" t="e"><f>1/0</f><v>#DIV/0!</v></c>')
UNCOMPUTED = "a.xlsx:2: the cell A2 has a formula without a result"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([["a"], [ERROR]], ["a.xlsx:2: the cell A2 has the error #DIV/0!"]),
        ([["a"], [ERROR], ["x"], [ERROR]], [f"a.xlsx:{row}: the cell A{row} has the error" for row in (2, 4)]),
        ([["a"], [Xml('<c r="{}"><f>B1</f></c>')]], [UNCOMPUTED]),
        ([["a"], [Xml('<c r="{}" s="1"><f t="shared" si="0"/><v></v></c>')]], [UNCOMPUTED]),
        ([["a"], [Xml('<c r="{}"><f>B1</f><v/></c>')]], [UNCOMPUTED]),
        ([["a"], [Xml('<c r="{}"><f>B1</f><v /></c>')]], [UNCOMPUTED]),
        ([["a"], [Xml('<c r="{}">\n  <f>B1</f>\n  <v></v>\n</c>')]], [UNCOMPUTED]),
        ([["a"], [Xml("<c r='{}' t='e'><v>#REF!</v></c>")]], ["a.xlsx:2: the cell A2 has the error #REF!"]),
        ([["a"], [Xml('<c t="e"><v>#REF!</v></c>')]], ["a.xlsx:2: the cell 1 of the row has the error #REF!"]),
        ([["a", "b"], ["x", "y", "z"]], ["a.xlsx:2: more cells than the header, row 1, has columns (3, not 2)"]),
        ([["a", "a"], ["x", "y"]], ["a.xlsx:1: two columns have the name `a`"]),
        ([["a"], [Xml('<c r="{}" t="s"><v>7</v></c>')]], ["a.xlsx: not an Excel workbook, damaged"]),
        ([["a"], [Xml("<c></row>")]], ["a.xlsx: not an Excel workbook, damaged"]),
    ],
)  # fmt: skip
def test_a_cell_without_text_is_refused_by_its_address(
    table: list[list[Cell]], said: list[str], tmp_path: Path
) -> None:
    found = refused(workbooks.write(tmp_path / "a.xlsx", {"Sheet1": table}))
    assert len(found) == len(said)
    assert all(line.startswith(beginning) for line, beginning in zip(found, said, strict=True))


def test_no_changed_or_missing_byte_loses_or_changes_a_row_in_silence(tmp_path: Path) -> None:
    """ZIP has checksums of what its files contain; damage to what stands beside may do no harm."""
    table: list[list[Cell]] = [["prompt", "completion"], *([f"Why {n}?", f"So {n}."] for n in range(20))]
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": table})
    sound, content = rows(path), path.read_bytes()
    harmless = 0
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        with contextlib.suppress(DataError):
            assert rows(path) == sound
            harmless += 1
    assert harmless < len(content) / 7 / 2
    path.write_bytes(content[:-20])
    assert refused(path)[0].startswith("a.xlsx: not an Excel workbook, damaged")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rows.csv", "text\none\n")
    assert refused(path)[0].startswith("a.xlsx: not an Excel workbook, damaged")


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": [["text"], ["one"]]})
    with refusal(MachineError, "pip install python-calamine"):
        rows(path)
