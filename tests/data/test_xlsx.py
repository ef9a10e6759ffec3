"""Facts about Excel workbooks: the text of their cells is read, and what has none, or is hostile, is refused."""

from __future__ import annotations

import contextlib
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import workbooks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workbooks import Cell, Xml

from finetune.data import sources, xlsx
from finetune.errors import DataError


def rows(path: Path) -> list[dict[str, Any]]:
    return [row.fields for row in sources.rows(str(path))]


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        rows(path)
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("Grüße;\n\"so\", 🙂", "Grüße;\n\"so\", 🙂"),
        (Xml('<c r="{}" t="inlineStr"><is><r><t>in</t></r><r><t> a line</t></r></is></c>'), "in a line"),
        (Xml('<c r="{}" t="inlineStr"><is><t>kanji</t><rPh sb="0" eb="1"><t>sound</t></rPh></is></c>'), "kanji"),
        (Xml('<c r="{}" t="str"><f>A1&amp;"!"</f><v>so!</v></c>'), "so!"),
        (Xml('<c r="{}" t="str"><f>""</f><v></v></c>'), ""),
        (Xml('<c r="{}" t="inlineStr"><is><t>one_x000D_\ntwo _x005F_x</t></is></c>'), "one\ntwo _x"),
        (Xml('<c r="{}" t="b"><v>1</v></c>'), "TRUE"), (Xml('<c r="{}" t="b"><v>0</v></c>'), "FALSE"),
        (42, "42"), (-7, "-7"), (0.1 + 0.2, "0.3"), (1e21, "1e+21"), (Xml('<c r="{}"><v>1E-3</v></c>'), "0.001"),
        (Xml('<c r="{}"><v>3.0</v></c>'), "3"), (Xml('<c r="{}" s="3"><v>0.5</v></c>'), "0.5"),
        (Xml('<c r="{}" s="1"><v>45292</v></c>'), "2024-01-01"),
        (Xml('<c r="{}" s="2"><v>45292.75</v></c>'), "2024-01-01 18:00:00"),
        (Xml('<c r="{}" s="1"><v>61</v></c>'), "1900-03-01"), (Xml('<c r="{}" s="1"><v>59</v></c>'), "1900-02-28"),
        (Xml('<c r="{}" s="5"><v>0.3125</v></c>'), "07:30:00"), (Xml('<c r="{}" s="4"><v>1.5</v></c>'), "1.5"),
        (Xml('<c r="{}" t="d"><v>2024-01-01T00:00:00</v></c>'), "2024-01-01T00:00:00"),
        (Xml('<c r="{}"/>'), ""), (None, ""),
    ],
)  # fmt: skip
def test_a_cell_is_read_as_text(cell: Cell, text: str, tmp_path: Path) -> None:
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": [["prompt", "completion"], ["Why?", cell]]})
    assert rows(path) == [{"prompt": "Why?", "completion": text}]


def test_dates_of_a_workbook_of_an_old_mac_count_from_1904(tmp_path: Path) -> None:
    cell = Xml('<c r="{}" s="1"><v>1</v></c>')
    assert rows(workbooks.write(tmp_path / "a.xlsx", {"S": [["a"], [cell]]}, since_1904=True)) == [{"a": "1904-01-02"}]


_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=st.lists(st.lists(_TEXT | st.none(), min_size=30, max_size=30), max_size=5))
def test_any_texts_come_back_with_their_rows_and_columns(table: list[list[str | None]], tmp_path: Path) -> None:
    """30 columns reach to AD; rows without a cell are left out, and count."""
    names = [f"column {number}" for number in range(30)]
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": [names, *table]})
    found = list(sources.rows(str(path)))
    expected = [(number, row) for number, row in enumerate(table, start=2) if any(row)]
    assert [row.location for row in found] == [f"{path}:{number}" for number, _ in expected]
    plain = [[xlsx._plain(cell) if cell else "" for cell in row] for _, row in expected]
    assert [list(row.fields.values()) for row in found] == plain


def test_the_only_sheet_with_rows_is_read_and_of_several_none(tmp_path: Path) -> None:
    table: list[list[Cell]] = [["text"], ["one"]]
    assert rows(workbooks.write(tmp_path / "a.xlsx", {"Empty": [], "Rows": table})) == [{"text": "one"}]
    said = refused(workbooks.write(tmp_path / "a.xlsx", {"Train": table, "Notes & more": [["x"]]}))
    assert said.startswith("a.xlsx: 2 sheets have rows (Train, Notes & more); save the one to train on")
    assert rows(workbooks.write(tmp_path / "a.xlsx", {"Empty": []})) == []


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([["a"], [Xml('<c r="{}" t="e"><f>1/0</f><v>#DIV/0!</v></c>')]], "a.xlsx:2: the cell A2 has the error #DIV/0!"),
        ([["a"], [Xml('<c r="{}"><f>B1</f></c>')]], "a.xlsx:2: the cell A2 has a formula without a result"),
        ([["a"], [Xml('<c r="{}"><f>B1</f><v></v></c>')]], "a.xlsx:2: the cell A2 has a formula without a result"),
        ([["a", "b"], ["x", "y", "z"]], "a.xlsx:2: more cells than the header, row 1, has columns (3, not 2)"),
        ([["a", "a"], ["x", "y"]], "a.xlsx:1: two columns have the name `a`"),
        ([["a"], [Xml('<c r="{}" t="s"><v>7</v></c>')]], "a.xlsx: not an Excel workbook, or damaged"),
        ([["a"], [Xml('<c r="{}" s="1"><v>1e300</v></c>')]], "a.xlsx: not an Excel workbook, or damaged"),
        ([["a"], [Xml('<c r="ZZZ2"><v>1</v></c>')]], "a.xlsx: not an Excel workbook, or damaged"),
        ([["a"], [Xml('<c r="A3"><v>1</v></c>')]], "a.xlsx: not an Excel workbook, or damaged"),
        ([["a"], [None, Xml('<c r="{}"/><c r="A2"><v>1</v></c>')]], "a.xlsx: not an Excel workbook, or damaged"),
    ],
)
def test_a_cell_without_text_is_refused_by_its_address(table: list[list[Cell]], said: str, tmp_path: Path) -> None:
    assert refused(workbooks.write(tmp_path / "a.xlsx", {"Sheet1": table})).startswith(said)


def test_several_broken_cells_are_reported_at_once(tmp_path: Path) -> None:
    broken = Xml('<c r="{}" t="e"><v>#N/A</v></c>')
    said = refused(workbooks.write(tmp_path / "a.xlsx", {"S": [["a"], [broken], ["x"], [broken]]}))
    assert said.splitlines()[1] == "a.xlsx:4: the cell A4 has the error #N/A; repair it, or empty it"


_LAUGHS = '<!DOCTYPE sst [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]><sst><si><t>&b;</t></si></sst>'


@pytest.mark.parametrize(
    "parts",
    [
        {"xl/sharedStrings.xml": _LAUGHS},
        {"xl/sharedStrings.xml": '<!DOCTYPE sst SYSTEM "file:///etc/hostname"><sst/>'},
        {"xl/worksheets/sheet1.xml": "<worksheet><sheetData><row></sheetData></worksheet>"},
        {"xl/worksheets/sheet1.xml": '<worksheet><sheetData><row r="9999999"/></sheetData></worksheet>'},
        {"xl/worksheets/sheet1.xml": '<worksheet><row><c t="s"><v>-1</v></c></row></worksheet>'},
        {"xl/_rels/workbook.xml.rels": "<Relationships/>", "xl/workbook.xml": "<workbook"},
        {"_rels/.rels": "<Relationships/>"},
        {"_rels/.rels": '<?xml version="1.0" encoding="no-such-code"?><Relationships/>'},
    ],
)
def test_a_hostile_or_damaged_part_is_refused(parts: dict[str, str], tmp_path: Path) -> None:
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": [["text"], ["one"]]}, parts=parts)
    assert refused(path).startswith("a.xlsx: not an Excel workbook, or damaged")


@pytest.mark.slow
def test_a_decompression_bomb_is_refused_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xlsx, "_PART_BYTES", 2**20)
    monkeypatch.setattr(xlsx, "_SHEET_BYTES", 2**21)
    monkeypatch.setattr(xlsx, "ROW_BYTES", 2**20)
    bombs = {
        "xl/sharedStrings.xml": "<sst>" + "<si/>" * 2**20 + "</sst>",
        "xl/worksheets/sheet1.xml": "<worksheet><sheetData>" + "<!-- x -->" * 2**20,
        "xl/styles.xml": "<styleSheet>" + "x" * 2**21 + "</styleSheet>",
    }
    for part, content in bombs.items():
        path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": [["text"], ["one"]]}, parts={part: content})
        assert path.stat().st_size < 2**17
        tracemalloc.start()
        assert f"{part} is too large" in refused(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**22
        tracemalloc.stop()
    long = Xml('<c r="{}" t="inlineStr"><is><t>' + "x" * 2**19 + "</t></is></c>")
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": [["a", "b", "c"], [long, long, long]]})
    assert refused(path).startswith("a.xlsx:2: the row is longer than 1 MiB")


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_refused(cut: float, tmp_path: Path) -> None:
    path = workbooks.write(tmp_path / "a.xlsx", {"Sheet1": [["text"], *([f"one {n}"] for n in range(99))]})
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    assert refused(path).startswith("a.xlsx: not an Excel workbook, or damaged")


@pytest.mark.slow
def test_no_changed_byte_loses_or_changes_a_row_in_silence(tmp_path: Path) -> None:
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


def test_a_zip_archive_of_other_files_is_not_a_workbook(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as archive:
        archive.writestr("rows.csv", "text\none\n")
    assert refused(tmp_path / "a.xlsx").startswith("a.xlsx: not an Excel workbook, or damaged")
