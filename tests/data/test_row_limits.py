"""Time and memory are bounded whatever a file holds: what no row can use is refused before it is worked on.

The bound on time is several times what a slow machine takes.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from jobs import write_rows
from messages import refusal

from finetune.config import DataSection
from finetune.data import lines, readers, sources, tokenizing
from finetune.data.counts import Counts
from finetune.data.prepare import prepare
from finetune.data.readers import NO_HEADER
from finetune.errors import DataError


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 60


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(sources.rows(str(path)))
    return str(caught.value)


# -- one row of very much text ---------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(word_tokenizer: Callable[..., Any], chatml: str) -> Any:
    return word_tokenizer(chatml)


LONG = {
    "text": lambda long: {"text": long},
    "completion": lambda long: {"prompt": "Hi", "completion": long},
    "prompt": lambda long: {"prompt": long, "completion": "Hello"},
    "question": lambda long: {"messages": [said("user", long), said("assistant", "Hello")]},
    "turns": lambda long: {"messages": [said("user", long[: len(long) // 4]), said("assistant", "so")] * 4},
    "call": lambda long: {"messages": [said("user", "Hi"), said("assistant", long)]},
}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("kind", LONG)
def test_more_text_than_is_tokenized_is_refused_or_dropped_and_counted(
    kind: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "TEXT_CHARACTERS", 4000)
    path, short = tmp_path / "rows.jsonl", LONG[kind]("two two")

    def prepared(**settings: Any) -> Counts:
        return prepare(DataSection(train=str(path), eval="none", **settings), tokenizer).train_counts

    write_rows(path, (short, LONG[kind]("two " * 1001), short))
    for too_long in ("truncate", "split", "error"):
        with refusal(DataError, "rows.jsonl:2"):
            prepared(too_long=too_long)
    counts = prepared(too_long="drop")
    assert (counts.rows, counts.dropped_why) == (2, {"over data.max_length": 1})
    assert counts.places(what="dropped") == [f"{path}:2"]
    if kind == "text":  # as much as is tokenized is
        write_rows(path, [{"text": "two " * 1000}])
        assert prepared(max_length=100, too_long="split").tokens > 2000


# -- files that unpack to much, or to nothing ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blank"),
    [
        ("rows.jsonl", "\n"), ("rows.json", "\n"), ("rows.txt", "\n"), ("rows.jsonl", "\r\n"), ("rows.csv", " \n"),
    ],
)  # fmt: skip
def test_a_gigabyte_of_line_breaks_is_refused(
    name: str, blank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After fewer, here, than the million that the message names."""
    assert 10**6 <= lines._BLANK_LINES < 1.1 * 10**6
    monkeypatch.setattr(lines, "_BLANK_LINES", 2**16)
    path = tmp_path / f"{name}.gz"
    start = {"rows.json": b"[", "rows.csv": b"text\n"}.get(name, b"")
    piece = gzip.compress(blank.encode() * (2**22 // len(blank)), 1)
    path.write_bytes(gzip.compress(start) + piece * 256)
    assert "over a million blank lines" in refused(path)


def test_thousands_of_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" * 50_000 + '{"text": "so"}' + "\n" * 50_000)
    assert [row.location for row in sources.rows(str(path))] == [f"{path}:50001"]


@pytest.fixture
def short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row: a MiB, so that the files are written in no time."""
    for module in (lines, readers):
        monkeypatch.setattr(module, "ROW_BYTES", 2**20)


def test_the_bound_of_a_row_holds_in_a_list_too(tmp_path: Path, short_bound: None) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "so"}, {"text": "x" * 2**20}]))
    assert f"{path}:1:18: an item is longer than 1 MiB" in refused(path)


def test_a_row_of_many_short_lines_is_bounded(tmp_path: Path, short_bound: None) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text\nso\n"' + ('x" "' * 5 + "\n" + 'x","' * 5 + "\n") * 50_000)
    assert "rows.csv:3 to 4, 6, " in refused(path)


def parquet(table: pyarrow.Table, path: Path) -> None:
    pyarrow.parquet.write_table(table, path, compression="zstd")


def arrow(table: pyarrow.Table, path: Path) -> None:
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_stream(str(path), table.schema, options=options) as writer:
        writer.write_table(table)


def test_a_small_file_with_a_row_of_much_is_refused(tmp_path: Path, short_bound: None) -> None:
    long = pyarrow.table({"text": ["a" * (2**20 + 1)]})
    numbers = pyarrow.array([[7] * 2**18], pyarrow.list_(pyarrow.int64()))
    for write, table in (
        (parquet, long),
        (parquet, pyarrow.concat_tables([pyarrow.table({"text": ["so"] * 10}), long])),
        (parquet, pyarrow.table({"text": ["so"], "n": numbers})),
        (arrow, long),
    ):
        path = tmp_path / f"rows.{write.__name__}"
        write(table, path)
        assert path.stat().st_size < 2**16
        assert "a row takes more than" in refused(path)


def test_a_large_dictionary_of_short_values_is_read(tmp_path: Path, short_bound: None) -> None:
    """Each row refers to one of them, so that a row is short and a batch looks long."""
    values = pyarrow.array([f"{number} " + "x" * 2000 for number in range(1000)])
    table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(pyarrow.array([5, 999, 5]), values)})
    with pyarrow.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    found = [row.fields["text"][:6] for row in sources.rows(str(tmp_path / "rows.arrow"))]
    assert found == ["5 xxxx", "999 xx", "5 xxxx"]


def test_views_into_a_large_buffer_are_read(tmp_path: Path, short_bound: None) -> None:
    """As Polars writes its Arrow files."""
    kind = pyarrow.list_(pyarrow.struct({"role": pyarrow.string_view(), "content": pyarrow.string_view()}))
    rows = [[said("user", f"{number} " + "x" * 40_000)] for number in range(40)]
    table = pyarrow.table({"messages": pyarrow.array(rows, kind)})
    with pyarrow.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert [row.fields["messages"][0]["content"] for row in sources.rows(str(tmp_path / "rows.arrow"))] == [
        row[0]["content"] for row in rows
    ]


# -- wide and deep ---------------------------------------------------------------------------------------------------

NAMES = [f"name{number}" for number in range(100_000)]


def test_an_object_followed_by_many_blank_lines_is_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"text": "one"}' + "\n" * 500_000 + "two")
    assert refused(path).startswith(f"{path}: expected a list of objects; if it has one object per line")


def test_a_header_of_a_hundred_thousand_names_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(NAMES) + "\n" + ",".join("x" for _ in NAMES) + "\n")
    assert [len(row.fields) for row in sources.rows(str(path))] == [len(NAMES)]
    path.write_text(",".join([*NAMES, NAMES[-1]]) + "\n")
    assert refused(path) == f"{path}:1: two columns have the name `name99999`; rename one. {NO_HEADER}"


def test_an_object_of_a_hundred_thousand_keys_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(dict.fromkeys(NAMES, 1)) + "\n")
    assert [len(row.fields) for row in sources.rows(str(path))] == [len(NAMES)]
    path.write_text(json.dumps(dict.fromkeys(NAMES, 1))[:-1] + ', "name99999": 2}\n')
    assert refused(path) == f"{path}:1: the key `name99999` is given twice in one object; keep one"


def test_a_message_about_many_or_long_names_is_short(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    wide = json.dumps(dict.fromkeys(NAMES[:20_000], 1)) + "\n"
    path.write_text(wide * 2 + json.dumps({"k" * 2**20: 1}) + "\n")
    for columns in ({}, {"text": "name19999x"}):
        with refusal(DataError, f"{path}:1 to 2") as caught:
            prepare(DataSection(train=str(path), eval="none", columns=columns), tokenizer)
        assert len(str(caught.value)) < 10_000


def test_nesting_is_bounded_before_anything_recurses(tmp_path: Path, tokenizer: Any) -> None:
    for opening, closing in (("[", "]"), ('{"a": ', "}")):
        for name in ("rows.jsonl", "rows.json"):
            for levels in (90, 110, 990, 100_000):
                path = tmp_path / name
                row = '{"text": "so so", "deep": ' + opening * levels + "1" + closing * levels + "}"
                path.write_text(f"[{row}]" if name == "rows.json" else row)
                job = DataSection(train=str(path), eval_share=0.001)  # by a hash of all fields
                if levels < 100:
                    assert prepare(job.model_copy(update={"eval": "none"}), tokenizer).train_counts.rows == 1
                else:
                    with refusal(DataError, "nested too deeply"):
                        prepare(job, tokenizer)
