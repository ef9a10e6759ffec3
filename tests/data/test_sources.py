"""Facts about sources: every kind gives the same rows, and errors name the line and column."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import workbooks
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refusal
from packed import packed

from finetune.config import Source
from finetune.data import lines, readers, sources
from finetune.data.compressed import COMPRESSIONS
from finetune.data.readers import READERS, TEXT_READERS
from finetune.data.strict_json import Decoder, JsonError
from finetune.errors import DataError, MachineError

ROWS: list[dict[str, Any]] = [
    {"text": "plain", "note": "a"},
    {"text": 'comma, "quotes"\nand a second line', "note": ""},
    {"text": "– ünïcode 🙂\u2028", "note": "null"},
]


def write_table(path: Path, table: pyarrow.Table) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    kind = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    made = kind.with_name(f"plain{kind.suffix}")
    if kind.suffix in (".jsonl", ".ndjson"):
        made.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif kind.suffix == ".json":
        made.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif kind.suffix in (".csv", ".tsv"):
        with open(made, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter={".csv": ",", ".tsv": "\t"}[kind.suffix])
            writer.writeheader()
            writer.writerows(rows)
    elif kind.suffix == ".xlsx":
        workbooks.write(made, {"Sheet1": [list(rows[0]), *(list(row.values()) for row in rows)]})
    elif kind.suffix == ".txt":
        made.write_text("".join(row["text"] + "\n" for row in rows), encoding="utf-8")
    else:
        write_table(made, pyarrow.Table.from_pylist(rows))
    content = made.read_bytes()
    made.unlink()
    path.write_bytes(packed(content, path.suffix))
    return path


def read(path: Path | str) -> list[dict[str, Any]]:
    return [row.fields for row in sources.rows(str(path))]


def places(path: Path) -> list[str]:
    return [row.location.removeprefix(str(path)) for row in sources.rows(str(path))]


def refused(path: Path, content: bytes | str | None = None) -> str:
    """The message, without the folder, of reading a file with this content."""
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        list(sources.rows(str(path)))
    return str(caught.value).replace(f"{path.parent}{os.sep}", "")


# -- the same rows from every kind of file ---------------------------------------------------------------------------


NAMES = [f"rows{ending}" for ending in READERS] + [
    f"rows{ending}{compression}" for ending in TEXT_READERS for compression in COMPRESSIONS
]


def test_rows_come_back_as_they_were_written(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            rows = [{"text": "plain"}, {"text": "– ünïcode 🙂\u2028"}] if ".txt" in name else ROWS
            assert read(write(tmp_path / name, rows)) == rows


def test_an_ending_may_have_capitals(tmp_path: Path) -> None:
    for name in ("ROWS.JSONL", "rows.Csv", "rows.jsonl.GZ", "rows.v2.Json.Zst"):
        folder = tmp_path / name
        folder.mkdir()
        write(tmp_path / name.lower().replace("rows", "some"), ROWS).rename(folder / name)
        assert read(folder / name) == read(folder) == ROWS, name


_FIELD = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=30)
@given(rows=st.lists(st.fixed_dictionaries({"text": _FIELD, "n": st.integers() | st.none()}), min_size=1, max_size=5))
def test_any_json_lines_come_back(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert read(write(tmp_path_factory.getbasetemp() / "any.jsonl", rows)) == rows


BEYOND = {"date": pyarrow.date32(), "seconds": pyarrow.timestamp("s"), "zone": pyarrow.timestamp("ms", "UTC")}


def test_dates_that_python_lacks_are_read_with_their_rows(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Year 292,277 and its like stand for `never` in databases."""
    for kind in BEYOND:
        for suffix in [".parquet", ".arrow"]:
            with subtests.test(kind=kind, suffix=suffix):
                numbers = pyarrow.array([0, 2**31 - 1] if kind == "date" else [0, 2**53])
                stored = numbers.cast(pyarrow.int32()) if kind == "date" else numbers
                table = pyarrow.table({"text": ["one", "two"], "until": stored.view(BEYOND[kind])})
                found = list(sources.rows(str(write_table(tmp_path / f"rows{suffix}", table))))
                assert [row.fields["text"] for row in found] == ["one", "two"]
                assert "1970-01-01" in str(found[0].fields["until"])
                assert found[0].share() != found[1].share()
    dates = pyarrow.array([[2**53]], pyarrow.list_(pyarrow.int64())).cast(pyarrow.list_(pyarrow.timestamp("ms")))
    table = pyarrow.table({"text": ["one"], "dates": dates})  # not those within a list
    for suffix in [".parquet", ".arrow"]:
        path = write_table(tmp_path / f"rows{suffix}", table)
        assert refused(path).startswith(f"rows{suffix}[1]: the column `dates`")


def test_each_row_knows_its_location(tmp_path: Path) -> None:
    path = write(tmp_path / "many.parquet", [{"text": str(number)} for number in range(2500)])  # of several batches
    assert [row["text"] for row in read(path)] == [str(number) for number in range(2500)]
    assert places(path) == [f"[{number}]" for number in range(1, 2501)]
    assert places(write(tmp_path / "a.jsonl", ROWS)) == [":1", ":2", ":3"]
    assert places(write(tmp_path / "a.json", ROWS)) == ["[1]", "[2]", "[3]"]
    assert places(write(tmp_path / "a.parquet", ROWS)) == ["[1]", "[2]", "[3]"]
    assert places(write(tmp_path / "a.arrow", ROWS)) == ["[1]", "[2]", "[3]"]
    # The second row takes two lines.
    assert places(write(tmp_path / "a.csv", ROWS)) == [":2", ":3", ":5"]
    assert places(write(tmp_path / "a.csv.gz", ROWS)) == [":2", ":3", ":5"]


X, XY = [{"text": "x"}], [{"text": "x"}, {"text": "y"}]
MARK = "\ufeff"
SMALL: list[tuple[str, str, list[dict[str, Any]], list[str]]] = [
    # (the file, its content, its rows, their places)
    ("a.jsonl", '\n{"text": "x"}\r\n\r\n  \n{"text": "y"}', XY, [":2", ":5"]),
    ("a.json", '[{"text": "x"},\r\n{"text": "y"}]\r\n', XY, ["[1]", "[2]"]),
    ("a.csv", "text\r\nx\r\ny\r\n", XY, [":2", ":3"]),
    ("a.csv", f'{MARK}"text"\r\n"x"\r\n', X, [":2"]),
    *((f"a.{kind}", f"{MARK}text\nx\n", X, [":2"]) for kind in ("csv", "tsv")),
    ("a.jsonl", MARK + '{"text": "x"}\n', X, [":1"]),
    ("a.json", MARK + '[{"text": "x"}]', X, ["[1]"]),
    ("a.txt", MARK + "x\n \ny", XY, [":1", ":3"]),
    ("a.csv", "sep=;\na;b\nOne, two?;Three\n", [{"a": "One, two?", "b": "Three"}], [":3"]),
    ("a.csv", "note; of a visit\nx\nStayed; left.\n",
     [{"note; of a visit": "x"}, {"note; of a visit": "Stayed; left."}], [":2", ":3"]),
    ("a.csv", f"text\n{'x' * 200_000}\n", [{"text": "x" * 200_000}], [":2"]),  # the csv module's limit is 131,072
    *((f"a.{kind}", "", [], []) for kind in ("jsonl", "csv", "txt")),
]  # fmt: skip


def test_marks_line_ends_empty_lines_and_separators_do_no_harm(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name, content, rows, expected in SMALL:
        with subtests.test(name=name, content=content[:50]):
            (tmp_path / name).write_bytes(content.encode())
            assert read(tmp_path / name) == rows
            assert places(tmp_path / name) == expected


_CELL = st.text(st.sampled_from('a ,;\t|"\nü'), max_size=8)


@settings(max_examples=80)
@given(
    delimiter=st.sampled_from(",;\t|"), ending=st.sampled_from([".csv", ".tsv"]), mark=st.booleans(),
    ends=st.sampled_from(["\n", "\r\n"]), quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    table=st.lists(st.tuples(_CELL, _CELL, _CELL), min_size=1, max_size=4),
)  # fmt: skip
def test_any_cells_come_back_whatever_separates_them(
    delimiter: str, ending: str, mark: bool, ends: str, quoting: Any, table: list[tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """As Excel writes CSV in Europe: semicolons, a byte order mark, commas and line breaks in cells."""
    path = tmp_path_factory.getbasetemp() / f"any{ending}"
    with open(path, "w", encoding="utf-8-sig" if mark else "utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=ends, quoting=quoting)
        writer.writerows([("prompt", "completion", "note"), *table])
    found = [tuple(row.values()) for row in read(path)]
    assert found == table


def test_the_named_encoding_is_used_for_its_file_only(tmp_path: Path) -> None:
    words = "Grüße – „so“ 5 €"
    for name, encoding in [("a.csv", "cp1252"), ("b.csv", "utf-8"), ("c.csv.gz", "cp1252"), ("d.csv", "utf-8-sig")]:
        content = f'prompt;completion\n{words};"Ja,\nso"\n'.encode(encoding)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        found = [row.fields for row in sources.rows(str(tmp_path / name), encoding="cp1252")]
        assert found == [{"prompt": words, "completion": "Ja,\nso"}]
    assert refused(tmp_path / "a.csv").startswith(
        "a.csv:2: byte 3 of the line is not UTF-8: 0xFC; if that is `ü`, set `data.encoding: cp1252` (Windows-1252)"
    )
    (tmp_path / "a.txt").write_bytes(b"fine\nnot \x81\n")
    with refusal(DataError, "a.txt:2"):
        list(sources.rows(str(tmp_path / "a.txt"), encoding="cp1252"))


def test_the_first_word_that_shows_an_encoding(tmp_path: Path) -> None:
    for content, word in [
        (b"one\nGr\xfc\xdfe, Anna\n", "Grüße"), ("Grüße\n".encode(), None), (b"plain\n", None),
        (b"not \x81 nor \xfc\n", None),
    ]:  # fmt: skip
        (tmp_path / "a.txt").write_bytes(content)
        assert sources.foreign_word(str(tmp_path / "a.txt"), "cp1252") == word, content


def test_rows_are_read_lazily(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\nnot JSON\n')
    assert next(sources.rows(str(path))).fields == {"text": "x"}


# -- what is wrong, to the line and column ---------------------------------------------------------------------------


def test_invalid_utf_8_far_into_a_file_is_reported_with_its_byte(tmp_path: Path) -> None:
    message = refused(tmp_path / "a.csv", b"text\n" + b"xxxxxxxxxxxxxxx\n" * 3000 + b"caf\xe9\n")
    assert message.startswith("a.csv:3002: byte 4 of the line is not UTF-8")
    for content in (b"", b"PAR1", b"PAR1" + b"\xff" * 40 + b"PAR1", b"text\nx\n"):
        assert refused(tmp_path / "a.parquet", content).startswith("a.parquet: not a Parquet file")


# -- where rows are looked for ---------------------------------------------------------------------------------------


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    for name in ("train.jsonl", "other.csv", "train.xml"):
        (tmp_path / name).write_text("")
    message = refused(tmp_path / "trian.jsonl")
    assert message.startswith("trian.jsonl: no such file")
    assert "did you mean `train.jsonl`?" in message
    assert "train.xml" not in message


def test_a_path_that_can_only_be_local_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "no" / "train.jsonl")
    for source in ("no/", "./no", "/no/where", "no/*.jsonl"):
        with refusal(DataError):
            sources.rows(source)


def test_a_file_of_unknown_kind_is_refused_with_the_known_kinds(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in ["train.xml", "train.jsonl.zip", "train.parquet.gz", "train"]:
        with subtests.test(name=name):
            message = refused(tmp_path / name, "x")
            assert all(suffix in message for suffix in READERS)


def test_a_path_that_no_file_can_have_is_a_data_error(tmp_path: Path) -> None:
    sound = str(write(tmp_path / "a.jsonl", ROWS))
    for path, reason in (
        ("*/" * 2000 + "x.jsonl", "too many folders"), ("a\0.jsonl", "embedded null"), ("a\0/*.jsonl", "embedded null"),
        (f"{__file__}/x.jsonl", "Not a directory"),
    ):  # fmt: skip
        for look in (partial(sources.refuse_shared, sound, path), partial(sources.rows, path)):
            with pytest.raises(DataError, match=reason):
                look()


def linked_folder(folder: Path) -> None:
    (folder / "more").mkdir()
    write(folder / "more" / "b.jsonl", ROWS)
    (folder / "again").symlink_to("more")


def folder_name_that_is_no_text(folder: Path) -> None:
    inner = folder / os.fsdecode(b"b\xff")
    inner.mkdir()
    write(inner / "b.jsonl", ROWS)


def name_that_is_no_text(folder: Path) -> None:
    write(folder / "c.jsonl", ROWS).rename(folder / os.fsdecode(b"b\xff.jsonl"))


def two_of_three_parts(folder: Path) -> None:
    for number in (0, 2):
        write(folder / f"train-0000{number}-of-00003.jsonl", ROWS)


UNREAD = [
    (lambda folder: (folder / "b.jsonl").symlink_to("b.jsonl"), "b.jsonl' cannot be read: Too many levels of symbolic"),
    (lambda folder: (folder / "b.jsonl").symlink_to("gone.jsonl"), "b.jsonl: a broken link"),
    (linked_folder, "again: a link to a folder, which is not followed"),
    (lambda folder: os.mkfifo(folder / "b.jsonl"), "b.jsonl: a broken link, or not a regular file"),
    (name_that_is_no_text, r"b\\udcff.jsonl: the name is not UTF-8"),
    (folder_name_that_is_no_text, r"b\\udcff/b.jsonl: the name is not UTF-8"),
    (two_of_three_parts, "2 of 3 files train-…-of-00003.jsonl are here"),
]


def test_a_folder_whose_rows_would_be_skipped_silently_is_refused(tmp_path: Path) -> None:
    for number, (make, reason) in enumerate(UNREAD):
        folder = tmp_path / f"corpus{number}"
        folder.mkdir()
        write(folder / "a.jsonl", ROWS)
        assert read(folder) == ROWS
        make(folder)
        with pytest.raises(DataError, match=reason):
            sources.rows(str(folder))


def test_all_parts_are_read_and_a_pattern_takes_some(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"rows-0000{number}-of-00003.jsonl", ROWS)
        write(tmp_path / f"page-{number}-of-20.jsonl", ROWS)
    assert read(tmp_path) == ROWS * 6
    assert read(tmp_path / "rows-0000[01]-*.jsonl") == ROWS * 2


def test_the_builtin_keeps_its_own_held_out_rows_and_an_unknown_one_names_the_nearest() -> None:
    assert sources.kind_of("builtin:python_docs").holds_out("builtin:python_docs")
    assert not sources.kind_of("rows.jsonl").holds_out("rows.jsonl")
    assert next(sources.rows("builtin:python_docs", "eval")).location == "builtin:python_docs[eval]:1"
    with refusal(DataError, "`builtin:python_docs`"):
        list(sources.rows("builtin:python_doc"))


def test_a_hub_data_set_that_cannot_be_fetched_is_a_machine_error() -> None:
    with refusal(MachineError, "`someone/nothing` cannot be downloaded from the hub") as caught:
        list(sources.rows("someone/nothing"))
    assert "local file" not in str(caught.value)
    with refusal(MachineError, "A local file must end in .jsonl"):
        list(sources.rows("train.xml"))


# -- folders, patterns and several sources ---------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of files of several kinds, some of them beside the point; each row names its file."""
    folder = tmp_path / "corpus"
    for name in ("b.jsonl", "a.csv", "c/d.parquet", "c/a.json.gz", "ignored.xml", ".hidden/e.jsonl", "c/.f.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".xml"):
            (folder / name).write_text("<x/>")
        else:
            write(folder / name, [{"text": name}])
    return folder


def texts(source: Any) -> list[str]:
    return [row.fields["text"] for row in sources.rows(source)]


def test_a_folder_is_read_whole_in_the_order_of_names_without_hidden_and_unknown_files(corpus: Path) -> None:
    assert texts(str(corpus)) == texts(f"{corpus}/") == ["a.csv", "b.jsonl", "c/a.json.gz", "c/d.parquet"]


def test_a_pattern_reads_the_matching_files(corpus: Path) -> None:
    assert texts(f"{corpus}/*.jsonl") == ["b.jsonl"]
    assert texts(f"{corpus}/**/*.*") == ["a.csv", "b.jsonl", "c/a.json.gz", "c/d.parquet"]
    assert texts(f"{corpus}/[ab].*") == ["a.csv", "b.jsonl"]
    assert texts(str(write(corpus / "a[1].jsonl", [{"text": "x"}]))) == ["x"], "the name of a file"


def test_a_folder_that_datasets_saved_has_its_rows_once(tmp_path: Path) -> None:
    import datasets

    made = datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(3000)]})
    made.save_to_disk(tmp_path / "saved")
    write(tmp_path / "saved" / "cache-0123.arrow", [{"text": "again"}])
    assert texts(str(tmp_path / "saved")) == made["text"][:]


def test_several_sources_are_read_in_their_order_and_each_row_names_its_own(corpus: Path) -> None:
    several = [f"{corpus}/b.jsonl", Source(source=f"{corpus}/c")]
    assert [(row.fields["text"], row.source) for row in sources.rows(several)] == [
        ("b.jsonl", f"{corpus}/b.jsonl"), ("c/a.json.gz", f"{corpus}/c"), ("c/d.parquet", f"{corpus}/c"),
    ]  # fmt: skip
    weighted = [Source(source=f"{corpus}/a.csv", weight=3), f"{corpus}/b.jsonl"]
    assert texts(weighted) == ["a.csv", "a.csv", "a.csv", "b.jsonl"]


def test_a_fraction_of_a_weight_chooses_rows_by_their_content_alone(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(2000)]
    one, other = str(write(tmp_path / "a.jsonl", rows)), str(write(tmp_path / "b.json", rows[::-1]))
    for weight in (0.25, 2.9):
        first, second = (texts([Source(source=source, weight=weight)]) for source in (one, other))
        assert sorted(first) == sorted(second)
        # Four standard deviations of 2000 draws are at most 90.
        assert abs(len(first) - 2000 * weight) < 90
        assert {first.count(row["text"]) for row in rows[:100]} == {int(weight), int(weight) + 1}
    # One hash for both would hold out only rows that a weight keeps, or none.
    chosen = list(sources.rows([Source(source=one, weight=0.5)]))
    assert 0.15 < sum(row.share() < 0.2 for row in chosen) / len(chosen) < 0.25


def test_a_file_that_is_read_twice_or_missing_is_refused_before_the_first_is_read(corpus: Path) -> None:
    for several in ([str(corpus), f"{corpus}/b.jsonl"], [f"{corpus}/b.jsonl"] * 2, ["builtin:python_docs"] * 2):
        with refusal(DataError, "`weight`"):
            sources.rows(several)
    (corpus / "b.jsonl").write_text("no JSON\n")
    with refusal(DataError, "bb.jsonl:"):
        sources.rows([f"{corpus}/b.jsonl", f"{corpus}/bb.jsonl"])


def test_small_local_files_are_at_hand_and_others_are_not(corpus: Path, tmp_path: Path) -> None:
    assert sources.at_hand("builtin:python_docs")
    assert sources.at_hand(str(corpus))
    assert sources.at_hand([f"{corpus}/*.jsonl", Source(source="builtin:python_docs", weight=2)])
    assert not sources.at_hand("someone/rows")
    assert not sources.at_hand([str(corpus), "someone/rows"])
    for name in ("large_a.jsonl", "large_b.jsonl"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(10 * 2**20)
    assert sources.at_hand(str(tmp_path / "large_a.jsonl"))
    assert not sources.at_hand([str(tmp_path / "large_a.jsonl"), str(tmp_path / "large_b.jsonl")])


# -- JSON lists, item by item ----------------------------------------------------------------------------------------

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), _VALUES, max_size=3), max_size=5),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_a_list_comes_back(rows: list[dict[str, Any]], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    assert [value for value, _, _ in Decoder().items(text)] == rows


@settings(max_examples=100)
@given(data=st.data())
def test_a_broken_list_is_reported_at_the_position_that_json_gives(data: st.DataObject) -> None:
    text = json.dumps([{"text": "a", "n": [1, 2.5, None, True]}, {"text": "\u00e9\\ud83d", "m": {}}], indent=1)
    at = data.draw(st.integers(1, len(text) - 1))
    broken = text[:at] + data.draw(st.sampled_from(["", '"', "{", "]", ",", "x", "\x01"])) + text[at + 1 :]
    try:
        expected: Any = json.loads(broken)
    except json.JSONDecodeError as error:
        expected = error.pos
    try:
        found: Any = [value for value, _, _ in Decoder().items(broken)]
    except JsonError as error:
        found = error.at
    if expected != found:  # json tells a comma before the closing bracket at the comma (Python 3.13), we at the bracket
        assert broken[expected : found + 1].startswith(",")


# -- bounded memory --------------------------------------------------------------------------------------------------

MEASURE = """
import sys
import csv, gzip, json, pyarrow.parquet
from finetune.data import lines, sources

def peak_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

before = peak_bytes()
for path in sys.argv[1:]:
    try:
        print(sum(1 for _ in sources.rows(path)), peak_bytes() - before, sep=";")
    except sources.DataError as error:
        print(str(error).splitlines()[0].replace(";", ","), peak_bytes() - before, sep=";")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_files_of_90_mb_and_ten_gigabytes_of_zeros_are_read_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own. A file that the file system lost is as long as before, and full of zeros."""
    rows, cell = 4500, "A word and another. " * 1000
    some = (json.dumps({"text": cell}) + "\n").encode() * 100
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(some * (rows // 100), 1))
    (tmp_path / "rows.csv").write_bytes(b"text\n" + f"{cell}\n".encode() * rows)
    table = pyarrow.table({"text": [cell + str(number) for number in range(500)]})
    with pyarrow.parquet.ParquetWriter(tmp_path / "rows.parquet", table.schema) as writer:
        for _ in range(rows // 500):
            writer.write_table(table)
    whole = sorted(tmp_path.iterdir())
    for name in ("a.jsonl", "a.json", "a.csv"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(10 * 2**30)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEASURE, *map(str, whole), *map(str, sorted(tmp_path.glob("a.*")))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found, peaks = zip(*(line.split(";") for line in done.stdout.splitlines()), strict=True)
    assert found[:3] == (str(rows),) * 3
    assert int(peaks[2]) < 60 * 2**20, peaks
    assert len(found) == 6
    assert all("byte 1 of the line is NUL" in message for message in found[3:])
    assert int(peaks[-1]) < 400 * 2**20


def test_a_row_or_list_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiB here, so that the files are written in no time; the program's own is 64 (test_row_limits.py)."""
    for module in (lines, readers):
        monkeypatch.setattr(module, "ROW_BYTES", 2**20)
    for name, start, repeated, message in [
        ("a.jsonl", '{"text": "', "x", "a.jsonl:1: the line is longer than 1 MiB"),
        ("a.txt", "one\n", "x", "a.txt:2: the line is longer than 1 MiB"),
        ("a.json", '[{"text": "y"},\n {"text": "', "x", "a.json:2:11: not valid JSON: Unterminated string"),
        ("a.csv", 'text\none\n"', "x" * 999 + "\n", "a.csv:3: the row that begins here is longer than 1 MiB"),
    ]:
        times = 2 * 2**20 // len(repeated)
        assert refused(tmp_path / name, start + repeated * times).splitlines()[0].startswith(message)
    monkeypatch.setattr(lines, "LIST_CHARACTERS", 2**20)
    assert "jq -c '.[]'" in refused(tmp_path / "a.json", "[" + '{"text": "a"}, ' * 2**17)


OTHER_JSON: list[tuple[Any, str]] = [
    ({"prompt": {"0": "a", "1": "b"}, "completion": {"0": "c", "1": "d"}}, 'orient="columns"'),
    ({"prompt": ["a", "b"], "completion": ["c", "d"]}, 'orient="columns"'),
    ({"columns": ["prompt"], "index": [0], "data": [["a"]]}, 'orient="split"'),
    ({"data": [{"title": "a", "paragraphs": [{"context": "b", "qas": []}]}]}, "`data` and its `paragraphs`"),
    ({"participants": [{"name": "A"}], "messages": [{"sender_name": "A", "content": "b"}] * 2}, "messages of a chat"),
    ({"guild": {"id": 1}, "messages": [{"content": "b", "author": {"name": "A"}}]}, "messages of a chat"),
    ({"data": [{"text": "a"}]}, "`jq .data`"),
    ({"a": {"text": "b"}, "c": {"text": "d"}}, "`jq '[.[]]'`"),
    ({"messages": [{"role": "user", "content": "a"}]}, "`jq -s .`"),
]  # fmt: skip


def test_a_json_file_of_another_form_is_refused_with_what_makes_rows_of_it(tmp_path: Path) -> None:
    for value, cure in OTHER_JSON:
        assert cure in refused(tmp_path / "a.json", json.dumps(value))
