"""Every file of tests/data/broken is refused with its own message and exit code 3, before any weight is loaded.

The files stand there as a person would meet them; what only exists in packed form (cut compression, damaged Parquet) is
made here from sound rows, so that one can see what is wrong with it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY
from messages import refusal
from packed import packed

from finetune.config import DataSection, ModelSection
from finetune.data import sources
from finetune.data.compressed import COMPRESSIONS
from finetune.data.prepare import prepare
from finetune.data.problems import LIMIT
from finetune.errors import DataError
from finetune.model.source.tokenizer import load_tokenizer

CORPUS = Path(__file__).parent / "broken"

# The file, and for each line of its message how it begins and a word that it must have.
BROKEN: dict[str, list[tuple[str, str]]] = {
    # No JSON
    "cut_off.jsonl": [("cut_off.jsonl:3:71: not valid JSON", "Expecting value")],
    "cut_in_the_middle.jsonl": [("cut_in_the_middle.jsonl:2:71: not valid JSON", "Expecting value")],
    "cut_off.json": [("cut_off.json:3:11: not valid JSON", "Unterminated string")],
    "single_quotes.jsonl": [("single_quotes.jsonl:1:2: not valid JSON", "double quotes")],
    "trailing_comma.jsonl": [("trailing_comma.jsonl:2:20: not valid JSON", "property name")],
    "trailing_comma.json": [("trailing_comma.json:3:1: not valid JSON", "Expecting value")],
    "missing_comma.json": [("missing_comma.json:3:2: not valid JSON", "',' delimiter")],
    "two_rows_on_a_line.jsonl": [("two_rows_on_a_line.jsonl:2:27: not valid JSON", "Extra data")],
    "extra_data.json": [("extra_data.json:2:1: not valid JSON", "Extra data")],
    "empty.json": [("empty.json:1:1: not valid JSON", "Expecting value")],
    "pretty_printed.jsonl": [("pretty_printed.jsonl:1: ", "on one line")],
    "a_list.jsonl": [("a_list.jsonl:1: ", ".json")],
    "lines.json": [("lines.json: expected a list", ".jsonl")],
    "lines_of_messages.json": [("lines_of_messages.json: expected a list", ".jsonl")],
    "object.json": [("object.json: expected a list", "`jq .data`")],
    # JSON that Python reads, and nobody should
    "duplicate_key.jsonl": [("duplicate_key.jsonl:2: the key `text` is given twice", "keep one")],
    "duplicate_key.json": [("duplicate_key.json[2]: the key `text` is given twice", "keep one")],
    "duplicate_role.jsonl": [("duplicate_role.jsonl:2: the key `role` is given twice", "keep one")],
    "nan.jsonl": [("nan.jsonl:2: NaN is not a JSON value", "null")],
    "infinity.json": [("infinity.json[1]: -Infinity is not a JSON value", "null")],
    "huge_number.jsonl": [("huge_number.jsonl:2:1: not valid JSON", "4300 digits")],
    "deep.jsonl": [("deep.jsonl:2:1: not valid JSON", "nested too deeply")],
    "lone_surrogate.jsonl": [("lone_surrogate.jsonl:2: `text`", "surrogate pair at character 3")],
    # No UTF-8
    "latin1.jsonl": [("latin1.jsonl:2: byte 17 of the line is not UTF-8: 0xE9", "`data.encoding: cp1252`")],
    "latin1.json": [("latin1.json:2: byte 18 of the line is not UTF-8: 0xE9", "`data.encoding: cp1252`")],
    "latin1.csv": [("latin1.csv:3: byte 7 of the line is not UTF-8: 0xE9", "`data.encoding: cp1252`")],
    "latin1.txt": [("latin1.txt:2: byte 7 of the line is not UTF-8: 0xE9", "`data.encoding: cp1252`")],
    "utf16.jsonl": [("utf16.jsonl:1: byte 1: expected UTF-8 text", "iconv -f UTF-16 -t UTF-8")],
    "utf16_big_endian.jsonl": [("utf16_big_endian.jsonl:1: byte 1: expected UTF-8 text", "0xFEFF")],
    "utf16_without_mark.jsonl": [("utf16_without_mark.jsonl:1: byte 2 is NUL: looks like UTF-16LE", "iconv")],
    "utf32.jsonl": [("utf32.jsonl:1: byte 1: expected UTF-8 text", "iconv -f UTF-32 -t UTF-8")],
    "bom_inside.jsonl": [
        ("bom_inside.jsonl:3: bytes 1 to 3 of the line are a byte order mark", "0xEFBBBF"),
        ("bom_inside.jsonl:3: byte 14 of the line is not UTF-8: 0xE9", "`data.encoding: cp1252`"),
    ],
    "nul.jsonl": [("nul.jsonl:2: byte 13 of the line is NUL", "overwritten")],
    "nul.csv": [("nul.csv:3: byte 3 of the line is NUL", "overwritten")],
    "nul_tail.jsonl": [("nul_tail.jsonl:3: byte 1 of the line is NUL", "cut off")],
    # Another kind of file than its name says
    "gzip.jsonl": [("gzip.jsonl:1: byte 1: expected UTF-8 text", ".gz")],
    "spreadsheet.csv": [("spreadsheet.csv:1: byte 1: expected UTF-8 text", ".xlsx")],
    "text.jsonl.gz": [("text.jsonl.gz:1: ", "not a .gz file")],
    "text.jsonl.bz2": [("text.jsonl.bz2: files ending in .bz2 are not read", "`bzip2 -d`")],
    "text.jsonl.xz": [("text.jsonl.xz: files ending in .xz are not read", "`xz -d`")],
    "text.jsonl.zst": [("text.jsonl.zst:1: ", "not a .zst file")],
    "text.parquet": [("text.parquet: not a Parquet file", "damaged")],
    "text.arrow": [("text.arrow: not an Arrow file", "damaged")],
    "notes.md": [("notes.md: expected a file ending in .jsonl", ".arrow")],
    # Tables
    "uneven.csv": [
        ("uneven.csv:3: more cells than the header has columns", "3, not 2"),
        ("uneven.csv:4: fewer cells than the header has columns", "1, not 2"),
    ],
    "uneven.tsv": [("uneven.tsv:3: more cells than the header has columns", "3, not 2")],
    "duplicate_header.csv": [("duplicate_header.csv:1: ", "two columns have the name `text`")],
    "no_header.csv": [
        ("no_header.csv:2 to 3: no format has the fields What is 2+2?, 4; ", "the file has no header line")
    ],
    "no_header.tsv": [("no_header.tsv:2: no format has the fields What is 2+2?, 4; ", "the file has no header line")],
    "no_header_same_cells.csv": [("no_header_same_cells.csv:1: two columns", "the file has no header line")],
    "unclosed_quote.csv": [("unclosed_quote.csv:3: not valid CSV in the row that begins here", "end of data")],
    "stray_quote.csv": [("stray_quote.csv:2: not valid CSV in the row that begins here", "expected after")],
    "semicolons.csv": [("semicolons.csv:3: more cells than the header has columns", "3, not 2")],
    "text.xlsx": [("text.xlsx: not an Excel workbook", "save it again")],
    "old.xlsx": [
        ("old.xlsx: not an Excel workbook, damaged, or with a password", "save it again as .xlsx without one")
    ],
    # Rows that are no examples
    "not_an_object.jsonl": [("not_an_object.jsonl:2 to 5: ", "JSON object")],
    "item_is_text.json": [(f"item_is_text.json: item {item} ", "JSON object") for item in (2, 4)],
    "unknown_fields.jsonl": [
        ("unknown_fields.jsonl:1: no format has the fields question, answer", "{prompt: question, completion: answer}")
    ],
    "mixed_formats.jsonl": [("mixed_formats.jsonl:3: `messages`", "")],
    "unknown_role.jsonl": [("unknown_role.jsonl:2: `messages[1].role`", "'gpt'")],
    "content_is_a_number.jsonl": [("content_is_a_number.jsonl:2: `messages[1].content`", "a number")],
    "content_is_missing.jsonl": [("content_is_missing.jsonl:2: `messages[0].content`", "missing")],
    "message_is_text.jsonl": [("message_is_text.jsonl:2: `messages[0]`", "object")],
    "messages_are_empty.jsonl": [("messages_are_empty.jsonl:2: `messages`", "at least one")],
    "no_assistant.jsonl": [("no_assistant.jsonl:2: ", "no assistant turn")],
    "null_text.jsonl": [("null_text.jsonl:2: `text` must be text", "null")],
    # No rows, or none that teaches
    "empty.jsonl": [("`data.train` (", "has no rows")],
    "blank_lines.jsonl": [("`data.train` (", "has no rows")],
    "blank.txt": [("`data.train` (", "has no rows")],
    "empty_list.json": [("`data.train` (", "has no rows")],
    "header_alone.csv": [("`data.train` (", "has no rows")],
    "empty_texts.jsonl": [("`data.train` (", "3 rows dropped")],
    # Many problems
    "several.jsonl": [
        ("several.jsonl:2:10: not valid JSON", "Unterminated string"),
        ("several.jsonl:4: `text` must be text", "a number"),
        ("several.jsonl:5: ", "JSON object"),
        ("several.jsonl:6: the key `text`", "twice"),
    ],
    "thirty.jsonl": [
        (f"thirty.jsonl:2 to {1 + LIMIT}: `text` must be text", "a number"),
        ("Reading stopped after 20 problems", "may be more"),
    ],
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelSection())


def refused(source: Path, tokenizer: Any) -> list[str]:
    """The lines of the message, without the folder."""
    with pytest.raises(DataError) as caught:
        prepare(DataSection(train=str(source), eval="none"), tokenizer)
    assert caught.value.exit_code == 3
    return str(caught.value).replace(f"{source.parent}{os.sep}", "").splitlines()


def test_every_broken_file_of_the_corpus_has_an_expected_message() -> None:
    assert {path.name for path in CORPUS.iterdir() if not path.name.startswith(".")} == set(BROKEN)


@pytest.mark.slow
def test_all_problems_of_a_broken_file_are_reported_with_their_lines(tokenizer: Any, subtests: pytest.Subtests) -> None:
    for name in BROKEN:
        with subtests.test(name=name):
            messages = refused(CORPUS / name, tokenizer)
            assert len(messages) == len(BROKEN[name]), messages
            for line, (beginning, word) in zip(messages, BROKEN[name], strict=True):
                assert line.startswith(beginning)
                assert word in line


def test_a_folder_of_broken_files_tells_of_more_than_the_first(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("cut_off.json", "latin1.csv", "null_text.jsonl", "text.jsonl.gz", "text.jsonl.xz"):
        (folder / name).write_bytes((CORPUS / name).read_bytes())
    places = [line.split(" ")[0].removeprefix(f"corpus{os.sep}") for line in refused(folder, tokenizer)]
    assert places == ["cut_off.json:3:11:", "latin1.csv:3:", "null_text.jsonl:2:", "text.jsonl.gz:1:", "text.jsonl.xz:"]


# -- what is packed --------------------------------------------------------------------------------------------------

SOUND = "".join(json.dumps({"text": f"Line {number}, {number**3}."}) + "\n" for number in range(10_000)).encode()


@pytest.mark.slow
def test_a_compressed_file_that_is_cut_off_is_reported_with_the_line_it_stops_near(tmp_path: Path) -> None:
    for ending in COMPRESSIONS:
        path = tmp_path / f"rows.jsonl{ending}"
        path.write_bytes(packed(SOUND, ending)[:-5000])
        read: list[sources.Row] = []
        with refusal(DataError, "cut off") as caught:
            read.extend(sources.rows(str(path)))
        assert str(caught.value).startswith(f"{path}:{len(read) + 1}: ")
        assert 1000 < len(read) < 10_000


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_damaged_arrow_file_is_reported_and_crashes_nothing(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    import pyarrow

    path = tmp_path / "rows.arrow"
    table = pyarrow.table({"text": [f"Line {number}" for number in range(1000)]})
    make = {"stream": pyarrow.ipc.new_stream, "file": pyarrow.ipc.new_file}[kind]
    with make(str(path), table.schema) as writer:
        writer.write_table(table)
    whole = path.read_bytes()
    text = whole.index(b"Line 0Line 1")
    for damaged in (
        whole[: text + 3000],  # cut off
        whole[: text - 100] + b"\x7f" * 60 + whole[text - 40 :],  # the offsets
        whole[:text] + b"\xff" * 10 + whole[text + 10 :],
    ):
        path.write_bytes(damaged)
        [line] = refused(path, tokenizer)
        assert line.startswith("rows.arrow: not an Arrow file or stream, or damaged")


def test_a_folder_without_readable_files_is_refused_with_the_known_endings(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("notes.md", ".hidden.jsonl", "dataset_info.json"):
        (folder / name).write_text('{"text": "A line."}\n')
    [line] = refused(folder, tokenizer)
    assert line.startswith("corpus: the folder has no file ending in .jsonl")


# -- as the command line tells it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["empty.jsonl", "thirty.jsonl"])
def test_training_stops_with_exit_code_3_before_it_loads_a_weight(
    name: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("finetune.model.build.load_base", loaded)
    run = tmp_path / "run"
    code, _, output = call("train", TINY, f"data.train={CORPUS / name}", "data.eval=none", f"output.dir={run}")
    assert code == 3
    assert output.startswith("error: ")
    assert all(beginning in output and word in output for beginning, word in BROKEN[name])
    assert not run.exists()
