"""Data that would run code, take the reader's own files along, or fill the memory."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pyarrow
import pytest
from hostile import TINY, Trap, refused
from messages import refusal

from finetune.data import sources
from finetune.data.problems import Problems
from finetune.data.source_kinds import HubDataSet
from finetune.errors import DataError

ROW = json.dumps({"prompt": "Say", "completion": "word"}) + "\n"


@pytest.fixture
def look(call, foreign: Path):
    """`finetune data` on a source."""

    def run(source: object):
        return call("data", TINY, f"data.train={source}", "data.eval=none", "--json")

    return run


def test_a_folder_with_a_loading_script_gives_its_rows_alone(foreign: Path, trap: Trap, look) -> None:
    (foreign / "foreign.py").write_text(trap.python)
    (foreign / "dataset_infos.json").write_text("{}")
    (foreign / "rows.jsonl").write_text(ROW * 3)
    ended = look(foreign / "*.jsonl")
    assert (ended.code, json.loads(ended.out)["train"]["rows"]) == (0, 3)


def test_a_hub_data_set_with_a_loading_script_is_refused(
    foreign: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `datasets` says of it, asked with a local folder, as there is no hub here."""
    (foreign / "foreign.py").write_text(trap.python)
    with refusal(DataError, "script"):
        list(HubDataSet().records(str(foreign / "foreign.py"), "train", "data.train", Problems(), None))
    assert not trap.went_off


def test_a_pickle_in_an_arrow_schema_is_not_read(foreign: Path, trap: Trap, look) -> None:
    """Older versions of pyarrow unpickled such a type when they read a file (CVE-2023-47248)."""
    extension = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(trap, 0)}
    field = pyarrow.field("text", pyarrow.string(), metadata=extension)
    table = pyarrow.table({"text": ["some words"] * 3}, schema=pyarrow.schema([field]))
    with pyarrow.OSFile(str(foreign / "rows.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert look(foreign / "rows.arrow").code == 0


def test_a_link_in_a_folder_is_followed(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text(ROW)
    (foreign / "rows.jsonl").symlink_to(tmp_path / "blob")
    assert len(list(sources.rows(str(foreign), problems=Problems()))) == 1


@pytest.mark.slow
def test_a_compressed_bomb_takes_the_memory_of_the_longest_row(foreign: Path, look) -> None:
    bomb = foreign / "rows.jsonl.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(400):
            file.write(b"a" * 2**20)
    ended = look(bomb)
    refused(ended, f"{bomb}:1: the line is longer than 64 MiB", code=3)
    assert ended.grown_bytes < 320 * 2**20


def test_an_archive_is_not_unpacked(foreign: Path, look) -> None:
    import zipfile

    archive = foreign / "rows.jsonl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../outside.jsonl", ROW)
    refused(look(archive), "is a ZIP archive", code=3)
