"""Facts about sources: every kind gives the same rows, and what is wrong in a file is told to the line and column."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data import sources
from finetune.data.sources import READERS
from finetune.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"text": "plain", "note": "a"},
    {"text": 'comma, "quotes"\nand a second line', "note": ""},
    {"text": "– ünïcode 🙂\u2028", "note": "null"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [row.fields for row in sources.rows(str(path))]


def places(path: Path) -> list[str]:
    return [row.place.removeprefix(str(path)) for row in sources.rows(str(path))]


def refused(path: Path, content: bytes | str | None = None) -> str:
    """The message, without the folder, of reading a file with this content."""
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        list(sources.rows(str(path)))
    return str(caught.value).replace(f"{path.parent}{os.sep}", "")


# -- the same rows from every kind of file ---------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", READERS)
def test_rows_come_back_as_they_were_written(suffix: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / f"rows{suffix}", ROWS)) == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_nested_fields_come_back_as_they_were_written(suffix: str, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}] * 2
    assert read(write(tmp_path / f"rows{suffix}", rows)) == rows


_FIELD = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(rows=st.lists(st.fixed_dictionaries({"text": _FIELD, "n": st.integers() | st.none()}), min_size=1, max_size=5))
def test_any_json_lines_come_back(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert read(write(tmp_path_factory.getbasetemp() / "any.jsonl", rows)) == rows


def test_a_parquet_file_of_many_batches_numbers_its_rows_through(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", [{"text": str(number)} for number in range(2500)])
    assert [row["text"] for row in read(path)] == [str(number) for number in range(2500)]
    assert places(path)[-1] == "[2500]"


def test_each_row_knows_its_place(tmp_path: Path) -> None:
    assert places(write(tmp_path / "a.jsonl", ROWS)) == [":1", ":2", ":3"]
    assert places(write(tmp_path / "a.json", ROWS)) == ["[1]", "[2]", "[3]"]
    assert places(write(tmp_path / "a.parquet", ROWS)) == ["[1]", "[2]", "[3]"]
    # A CSV row's place is its last line; the second row takes two.
    assert places(write(tmp_path / "a.csv", ROWS)) == [":2", ":4", ":5"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "x"}\r\n\r\n{"text": "y"}'),
        ("a.json", '[{"text": "x"},\r\n{"text": "y"}]\r\n'),
        ("a.csv", "text\r\nx\r\ny\r\n"),
    ],
)
def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert read(path) == [{"text": "x"}, {"text": "y"}]


def test_empty_lines_are_skipped_and_keep_the_count_of_lines_right(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "x"}\n\n  \n{"text": "y"}\n')
    assert places(path) == [":2", ":5"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_an_empty_file_has_no_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    assert read(tmp_path / name) == []


def test_rows_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\nnot JSON\n')
    assert next(sources.rows(str(path))).fields == {"text": "x"}


def test_a_cell_may_be_longer_than_the_csv_module_would_have_it(tmp_path: Path) -> None:
    """The csv module's limit of 131072 characters is no limit of a row of text."""
    rows = [{"text": "x" * 200_000}]
    assert read(write(tmp_path / "a.csv", rows)) == rows


# -- what is wrong, to the line and column ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"text": "x"}\n{"text": "y', "a.jsonl:2:10: "),
        ('{"text": "x"}\n{"text": "y\n{"text": "z"}\n', "a.jsonl:2:10: "),
        ('{"text": "x"}\n{"text": ["y"', "a.jsonl:2:14: "),
        ('{"text": "x"}\n{"text": ["y"\n', "a.jsonl:2:14: "),
        ('{"text": "x"}\n{"text": "y"\r\n{"text": "z"}\n', "a.jsonl:2:13: "),
        ("{'text': 'x'}\n", "a.jsonl:1:2: "),
        ('{"text": "a\0b"}\n', "a.jsonl:1:12: "),
        ("\0\0\0\0\n", "a.jsonl:1:1: "),
        ('{"text": "x"} {"text": "y"}\n', "a.jsonl:1:15: "),
    ],
)
def test_a_line_that_is_no_json_is_told_to_the_column(content: str, place: str, tmp_path: Path) -> None:
    message = refused(tmp_path / "a.jsonl", content)
    assert message.startswith(place)
    assert "not valid JSON" in message


def test_a_truncated_json_file_is_told_to_the_column(tmp_path: Path) -> None:
    assert refused(tmp_path / "a.json", '[\n {"text": "x"},\n {"text": "y').startswith("a.json:3:11: not valid JSON")


def test_an_empty_json_file_is_no_json(tmp_path: Path) -> None:
    assert refused(tmp_path / "a.json", "").startswith("a.json:1:1: ")


@pytest.mark.parametrize(
    ("name", "content", "line", "byte"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n', 2, 14),
        ("a.json", b'[{"text": "x"},\n {"text": "caf\xe9"}]\n', 2, 15),
        ("a.csv", b"text\nx\ncaf\xe9\n", 3, 4),
        ("a.csv", b"text\n" + b"xxxxxxxxxxxxxxx\n" * 3000 + b"caf\xe9\n", 3002, 4),
    ],
    ids=["jsonl", "json", "csv", "long csv"],
)
def test_what_is_not_utf_8_is_told_to_the_byte(name: str, content: bytes, line: int, byte: int, tmp_path: Path) -> None:
    message = refused(tmp_path / name, content)
    assert message.startswith(f"{name}:{line}: byte {byte} of the line is not UTF-8")


@pytest.mark.parametrize("value", ["[1, 2]", '"text"', "5", "null"])
def test_a_line_that_is_no_object_is_told(value: str, tmp_path: Path) -> None:
    message = refused(tmp_path / "a.jsonl", '{"text": "x"}\n' + value + "\n")
    assert message.startswith("a.jsonl:2: ")
    assert "JSON object" in message


def test_an_item_that_is_no_object_is_told_by_its_number(tmp_path: Path) -> None:
    assert "item 2 must be a JSON object" in refused(tmp_path / "a.json", '[{"text": "x"}, ["y"]]')


def test_an_object_where_a_list_belongs_is_shown_the_other_file_type(tmp_path: Path) -> None:
    assert ".jsonl" in refused(tmp_path / "a.json", '{"text": "x"}')


@pytest.mark.parametrize(
    "value", ["9" * 5000, "[" * 100_000, '{"a":' * 100_000], ids=["long number", "deep list", "deep object"]
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_beyond_what_the_reader_bears_is_refused_with_its_place(name: str, value: str, tmp_path: Path) -> None:
    content = '{"text": ' + value + "}"
    assert refused(tmp_path / name, content if name == "a.jsonl" else f"[{content}]").startswith(f"{name}:1")


def test_a_csv_row_with_too_many_cells_is_told_with_its_line(tmp_path: Path) -> None:
    message = refused(tmp_path / "a.csv", "text,note\nx,y\nx,y,z\n")
    assert message.startswith("a.csv:3: more cells than the header")


def test_a_csv_row_with_too_few_cells_lacks_the_last_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,note\nx\n")
    assert read(tmp_path / "a.csv") == [{"text": "x", "note": None}]


def test_an_unclosed_quote_of_a_csv_is_told(tmp_path: Path) -> None:
    assert "not valid CSV" in refused(tmp_path / "a.csv", 'text\n"never closed\n')


def test_a_parquet_file_that_is_none_is_told(tmp_path: Path) -> None:
    for content in (b"", b"PAR1", b"PAR1" + b"\xff" * 40 + b"PAR1", b"text\nx\n"):
        assert refused(tmp_path / "a.parquet", content).startswith("a.parquet: not a Parquet file")


@pytest.mark.parametrize("cut", ["truncated", "flipped"])
def test_a_damaged_parquet_file_is_told(cut: str, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([{"text": "x" * 50}] * 1000)
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    header = bytes(byte ^ 0xFF for byte in whole[4:60])
    assert refused(path, {"truncated": whole[:-100], "flipped": whole[:4] + header + whole[60:]}[cut])


# -- where rows are looked for ---------------------------------------------------------------------------------------


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    for name in ("train.jsonl", "other.csv", "train.txt"):
        (tmp_path / name).write_text("")
    message = refused(tmp_path / "trian.jsonl")
    assert message.startswith("trian.jsonl: no such file")
    assert "did you mean `train.jsonl`?" in message
    assert "train.txt" not in message


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "no" / "train.jsonl")


def test_a_folder_named_like_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    refused(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["train.txt", "train.JSONL", "train"])
def test_a_file_of_unknown_kind_is_told_the_kinds(name: str, tmp_path: Path) -> None:
    message = refused(tmp_path / name, "x")
    assert all(suffix in message for suffix in READERS)


def test_an_unknown_builtin_names_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean `builtin:python_docs`"):
        list(sources.rows("builtin:python_doc"))


def test_the_builtin_keeps_its_own_held_out_rows() -> None:
    assert sources.has_held_out_split("builtin:python_docs")
    assert not sources.has_held_out_split("rows.jsonl")
    row = next(sources.rows("builtin:python_docs", "eval"))
    assert row.place == "builtin:python_docs[eval]:1"


def test_a_hub_data_set_that_cannot_be_fetched_is_a_machine_error() -> None:
    """In a process of its own, for the hub library reads `HF_HUB_OFFLINE` once, on import."""
    program = (
        "from finetune.data import sources\nfrom finetune.errors import MachineError\n"
        "for name in ('someone/nothing', 'train.txt'):\n"
        "    try:\n        list(sources.rows(name))\n"
        "    except MachineError as error:\n        print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    hub, file = done.stdout.splitlines()
    assert "`someone/nothing` (train) cannot be fetched from the hub" in hub
    assert "local file" not in hub
    assert "A local file must end in .jsonl" in file
