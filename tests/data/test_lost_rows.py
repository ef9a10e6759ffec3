"""No row is lost in silence: damaged files give the rows they had, or a DataError that names the file.

Files are damaged at random, thousands of times: bits flipped, bytes replaced, removed, doubled, inserted and zeroed,
the end cut off. What must hold depends on what the kind of file can tell:

- compressed files carry checksums: the rows are those that were written, or the file is refused;
- Parquet and Arrow files tell how many rows they hold: never fewer, and no changed page where pages have checksums;
- text has neither: each line (of JSON, each item) is a row or a problem, whatever the damage made of it.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from messages import refusal
from packed import packed

from finetune.data import sources
from finetune.data.compressed import COMPRESSIONS
from finetune.errors import DataError

ROWS: list[dict[str, Any]] = [{"text": f"Line {number} of a file, {number**2}.", "n": number} for number in range(60)]
TABLE = pyarrow.Table.from_pylist(ROWS)


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def comma_separated() -> bytes:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerows([["text", "n"], *([row["text"].replace(",", ";"), row["n"]] for row in ROWS)])
    return file.getvalue().encode()


def two_streams(ending: str) -> bytes:
    return packed(json_lines(ROWS[:30]), ending) + packed(json_lines(ROWS[30:]), ending)


def parquet(**options: Any) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(TABLE, sink, row_group_size=25, **options)
    return sink.getvalue()


def arrow(make: Callable[..., Any]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with make(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=20)
    return sink.getvalue().to_pybytes()


def mutations(whole: bytes, count: int, seed: int = 7) -> Iterator[bytes]:
    """`whole`, each time with one damage."""
    chance = random.Random(seed)
    for _ in range(count):
        at, length = chance.randrange(len(whole)), chance.choice([1, 4, 8, 64, len(whole) // 3])
        before, hit, after = whole[:at], whole[at : at + length], whole[at + length :]
        match chance.choice(["flip", "flip", "byte", "cut", "double", "remove", "insert", "zero"]):
            case "flip":
                yield before + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :]
            case "byte":
                yield before + chance.randbytes(1) + whole[at + 1 :]
            case "cut":
                yield before
            case "double":
                yield before + hit + hit + after
            case "remove":
                yield before + after
            case "insert":
                yield before + chance.randbytes(length) + hit + after
            case "zero":
                yield before + bytes(len(hit)) + after


def read(path: Path, content: bytes) -> list[dict[str, Any]] | None:
    """The rows of a file with this content; None where it is refused."""
    path.write_bytes(content)
    try:
        return [row.fields for row in sources.rows(str(path))]
    except DataError as error:
        lines = str(error).splitlines()
    assert all(line.startswith((str(path), "Reading stopped")) for line in lines)
    return None


# -- with checksums --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ending", COMPRESSIONS)
def test_compressed_rows_are_read_back_exactly_or_refused(ending: str, tmp_path: Path) -> None:
    path, whole = tmp_path / f"rows.jsonl{ending}", two_streams(ending)
    assert read(path, whole) == ROWS
    first = packed(json_lines(ROWS[:30]), ending)  # cut off right behind it, a file is whole
    found = [read(path, damaged) for damaged in mutations(whole, 200) if damaged != first]
    assert all(rows in (None, ROWS) for rows in found)
    assert found.count(None) > 180


def test_compressed_files_are_read_to_the_last_stream_and_refused_where_one_is_damaged(tmp_path: Path) -> None:
    for ending in COMPRESSIONS:
        path, whole = tmp_path / f"rows.jsonl{ending}", two_streams(ending)
        # As pbzip2, bgzip and `cat` make them
        assert read(path, b"".join(packed(json_lines([row]), ending) for row in ROWS)) == ROWS
        # Zeros too: a file system leaves them where it lost the rest of a file.
        for behind in (b"\0" * 512, b"garbage", b"\n"):
            assert read(path, whole + behind) is None, (ending, behind)
        assert read(path, b"") is None
        second = len(packed(json_lines(ROWS[:30]), ending))
        path.write_bytes(whole[:second] + bytes([whole[second] ^ 1]) + whole[second + 1 :])
        with refusal(DataError, "rows.jsonl", ending):
            list(sources.rows(str(path)))


def test_a_changed_parquet_page_is_refused_where_pages_have_checksums(tmp_path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False}
    for checksums in (True, False):
        whole = parquet(write_page_checksum=checksums, **options)
        at = whole.index(b"Line 7 of")
        found = [read(tmp_path / "rows.parquet", whole[:at] + bytes([byte]) + whole[at + 1 :]) for byte in b"KMl1"]
        assert [rows is None for rows in found] == [checksums] * 4, "without one, a letter cannot be told from another"


# -- with a number of rows -------------------------------------------------------------------------------------------

COUNTED = {
    "checked.parquet": lambda: parquet(write_page_checksum=True),
    "plain.parquet": lambda: parquet(compression="zstd", use_dictionary=False),
    "stream.arrow": lambda: arrow(pyarrow.ipc.new_stream),
    "file.arrow": lambda: arrow(pyarrow.ipc.new_file),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_a_damaged_column_file_never_gives_fewer_rows(name: str, tmp_path: Path) -> None:
    path, whole = tmp_path / name, COUNTED[name]()
    assert read(path, whole) == ROWS
    found = [read(path, damaged) for damaged in mutations(whole, 200)]
    assert all(rows is None or len(rows) == len(ROWS) for rows in found)
    assert found.count(None) > 80


def test_an_arrow_stream_that_ends_between_two_batches_or_has_another_behind_it_is_refused(tmp_path: Path) -> None:
    whole = arrow(pyarrow.ipc.new_stream)
    for end in range(0, len(whole), 8):  # to which batches are aligned
        assert read(tmp_path / "rows.arrow", whole[:end]) is None
    # As `cat` makes it: Arrow would read the first alone.
    assert read(tmp_path / "rows.arrow", whole + whole) is None


# -- text ------------------------------------------------------------------------------------------------------------


def not_blank(content: bytes) -> int:
    return sum(bool(line.strip()) for line in content.decode(errors="replace").split("\n"))


TEXT: dict[str, tuple[bytes, Callable[[bytes], int]]] = {
    "rows.jsonl": (json_lines(ROWS), not_blank),
    "rows.txt": ("".join(row["text"] + "\n" for row in ROWS).encode(), not_blank),
    "rows.csv": (comma_separated(), lambda content: not_blank(content) - 1),
    "rows.json": (json.dumps(ROWS, indent=1).encode(), lambda content: len(json.loads(content))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT)
def test_each_line_of_damaged_text_is_a_row_or_a_problem(name: str, tmp_path: Path) -> None:
    whole, rows_in = TEXT[name]
    refused = 0
    for damaged in mutations(whole, 200):
        rows = read(tmp_path / name, damaged)
        refused += rows is None
        assert rows is None or len(rows) == rows_in(damaged) or (name == "rows.csv" and b'"' in damaged)
    assert refused > 40


def test_lines_that_end_in_carriage_returns_alone_and_a_git_lfs_pointer_are_refused(tmp_path: Path) -> None:
    for name, (whole, _) in TEXT.items():
        path = tmp_path / name
        if name != "rows.json":
            assert read(path, whole.replace(b"\r\n", b"\n").replace(b"\n", b"\r")) is None, name
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
        with refusal(DataError, "git lfs pull"):
            list(sources.rows(str(path)))
