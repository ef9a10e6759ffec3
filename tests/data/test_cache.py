"""Facts about what is kept of a preparation: found again while nothing has changed."""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import datasets
import pyarrow
import pytest
from jobs import write_rows
from messages import refusal

from finetune.config import DataSection, Source
from finetune.data import cache, fingerprint, prepared_writer, source_kinds, sources
from finetune.data.counts import Affected, Counts, Traits
from finetune.data.encoded import IGNORE, Encoded, Segment
from finetune.data.prepare import Prepared, prepare, prepare_held_out
from finetune.data.rows import RowTable, writer
from finetune.data.rows import mapped as map_file
from finetune.errors import DataError, MachineError
from finetune.extras.python_docs import rows as python_docs
from finetune.storage import files
from finetune.storage.private import data_cache, not_private

TEXTS = [{"text": f"one two {'so ' * number}"} for number in range(9)]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the entries, which only this test uses."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # which it read when imported
    monkeypatch.setattr(prepared_writer, "mapped", mapped)
    return cache.folder()


@pytest.fixture
def tokenizer(word_tokenizer: Callable[..., Any], chatml: str) -> Any:
    return word_tokenizer(chatml)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl", TEXTS)


_FILES: WeakKeyDictionary[RowTable, Path] = WeakKeyDictionary()


def mapped(file: Path) -> RowTable:
    rows = map_file(file)
    _FILES[rows] = file
    return rows


def file_of(rows: RowTable) -> Path:
    return _FILES[rows]


def section(source: Path, **settings: Any) -> DataSection:
    return DataSection(**{"train": str(source), "eval": "none", **settings})


def everything(prepared: Prepared) -> list[Any]:
    return [[*prepared.train], [*(prepared.eval or ())], prepared.train_counts, prepared.eval_counts]


def test_the_cache_is_where_datasets_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for variables in ({}, {"XDG_CACHE_HOME": "~/x"}, {"HF_HOME": "~/h"}, {"HF_DATASETS_CACHE": "d"}):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert data_cache() == runpy.run_path(datasets.config.__file__)["HF_DATASETS_CACHE"]


def test_rows_are_read_as_datasets_reads_them(tmp_path: Path) -> None:
    written = [
        (sources.Row(f"a:{row}", {}, "a"), Encoded((Segment([*range(row + 1)], [IGNORE, *range(row)]),)))
        for row in range(5)
    ]
    with writer(tmp_path / "rows") as write:
        write(written[:2])
        write(written[2:])
    rows, theirs = map_file(tmp_path / "rows"), datasets.Dataset.from_file(str(tmp_path / "rows"))
    assert [*rows] == theirs.to_list()
    assert len(rows) == len(theirs)
    assert rows.column_names == theirs.column_names
    assert all(rows[name] == theirs[name][:] for name in rows.column_names)
    some = ["labels", "place"]
    assert [*rows.select_columns(some)] == theirs.select_columns(some).to_list()
    with pytest.raises(IndexError):
        rows[5]


def test_rows_of_many_batches_have_the_fingerprint_of_one_and_are_not_joined_for_it() -> None:
    """Joined, lists of more than 2^31 tokens have no offsets of 32 bits."""
    lists = pyarrow.array([[*range(row % 50)] for row in range(1000)], pyarrow.list_(pyarrow.int32()))
    numbers = pyarrow.array([*range(1000)], pyarrow.int64())
    whole = pyarrow.table({"input_ids": lists, "labels": lists, "length": numbers, "shared": numbers})
    parts = pyarrow.concat_tables([whole.slice(at, 100) for at in range(0, 1000, 100)])
    pool, before = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool()), pyarrow.default_memory_pool()
    expected = fingerprint.of_rows(RowTable(whole))
    pyarrow.set_memory_pool(pool)
    try:
        assert fingerprint.of_rows(RowTable(parts)) == expected
    finally:
        pyarrow.set_memory_pool(before)
    assert pool.max_memory() < 4 * len(lists.flatten())


# -- what is found again ---------------------------------------------------------------------------------------------


def test_a_second_start_finds_the_rows_of_the_first(source: Path, tokenizer: Any, kept: Path) -> None:
    job = section(source, eval="auto", eval_share=0.5)
    first = prepare(job, tokenizer)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (kept, *kept.iterdir())} == {0o700}
    made = {file: file.stat().st_mtime_ns for file in kept.rglob("*.*")}
    second = prepare(job, tokenizer)
    assert file_of(second.train) == file_of(first.train)
    assert {file: file.stat().st_mtime_ns for file in kept.rglob("*.*")} == made
    assert len(list(kept.iterdir())) == 2
    assert everything(second) == everything(first)
    held_out, _ = prepare_held_out(job, tokenizer)
    assert file_of(held_out) == file_of(first.eval)


def test_the_rows_are_mapped_from_their_file_with_their_types(source: Path, tokenizer: Any, kept: Path) -> None:
    gc.collect()  # what earlier tests left is not freed meanwhile
    before = pyarrow.total_allocated_bytes()
    rows = prepare(section(source), tokenizer).train
    ids, count, text = pyarrow.list_(pyarrow.int32()), pyarrow.int64(), pyarrow.string()
    assert {field.name: field.type for field in rows.table.schema} == {
        "input_ids": ids, "labels": ids, "length": count, "trained": count, "place": text, "source": text,
    }  # fmt: skip
    assert pyarrow.total_allocated_bytes() == before
    expected = [*rows]
    shutil.rmtree(kept)
    assert [*rows] == expected, "rows in use outlive their entry"


def test_rows_left_out_are_listed_alike_by_a_second_start(tmp_path: Path, tokenizer: Any) -> None:
    source = write_rows(tmp_path / "a.jsonl", [*TEXTS, TEXTS[0], {"text": " "}])
    job = section(source, max_length=8, eval="auto", eval_share=0.3)
    first = prepare(job, tokenizer)
    assert {row["why"] for row in first.affected()} == {"duplicate", "empty answer", "over data.max_length"}
    assert list(prepare(job, tokenizer).affected()) == list(first.affected())


def test_any_other_setting_is_prepared_anew(source: Path, tmp_path: Path, tokenizer: Any) -> None:
    other = str(write_rows(tmp_path / "other.jsonl", TEXTS[:2]))
    held_out = {"eval": "auto", "eval_share": 0.3}
    changes: list[dict[str, Any]] = [
        {}, {"max_length": 5}, {"too_long": "drop"}, {"duplicates": "drop"}, {"loss_on": "last"}, {"format": "text"},
        {"columns": {"text": "text"}}, held_out, {**held_out, "eval_share": 0.6},
        {"train": [str(source), other]}, {"train": [other, str(source)]},
        {"train": [str(source), Source(source=other, weight=2)]},
    ]  # fmt: skip
    made = [prepare(section(source, **changed), tokenizer) for changed in changes]
    assert len({file_of(prepared.train) for prepared in made}) == len(changes)
    assert len({file_of(prepared.eval) for prepared in made if prepared.eval}) == 2


def test_one_other_byte_in_a_file_is_prepared_anew(source: Path, tokenizer: Any) -> None:
    first = prepare(section(source), tokenizer)
    before = source.stat()
    source.write_bytes(source.read_bytes().replace(b"one", b"two", 1))
    assert source.stat().st_size == before.st_size
    second = prepare(section(source), tokenizer)
    assert file_of(second.train) != file_of(first.train)
    assert second.train[0]["input_ids"] != first.train[0]["input_ids"]


def test_a_new_file_in_a_folder_is_prepared_anew_and_the_same_content_is_found(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_rows(folder / "a.jsonl", TEXTS)
    first = prepare(section(folder), tokenizer)
    write_rows(folder / "a.jsonl", TEXTS)
    assert file_of(prepare(section(folder), tokenizer).train) == file_of(first.train)
    write_rows(folder / "b.jsonl", TEXTS)
    assert prepare(section(folder), tokenizer).train_counts.rows == 2 * first.train_counts.rows == 18


def test_another_template_vocabulary_or_version_is_prepared_anew(
    source: Path, word_tokenizer: Any, chatml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = [
        word_tokenizer(chatml),
        word_tokenizer(chatml.replace("<|im_start|>", "<|im_start|> ")),
        word_tokenizer(chatml, special=["<|new|>"]),
        word_tokenizer(chatml, bos_token="<|im_start|>"),
    ]
    files = {file_of(prepare(section(source), tokenizer).train) for tokenizer in tokenizers}
    monkeypatch.setattr(prepared_writer, "_VERSION", prepared_writer._VERSION + 1)
    files.add(file_of(prepare(section(source), tokenizers[0]).train))
    assert len(files) == len(tokenizers) + 1


def test_counts_have_the_fields_of_this_version_of_the_preparation() -> None:
    """An earlier version of the package, which may share the cache, fails on a field that it does not know."""
    counts = Counts(rows=2, affected=[Affected("a:1", "dropped", "empty")], traits=Traits(unused=["id"]))
    stored = json.loads(json.dumps(counts.stored()))
    assert (prepared_writer._VERSION, {*stored}) == (12, {
        "rows", "tokens", "trained_tokens", "longest", "affected", "unused", "kinds", "run_together", "systems",
        "schema_ordered", "segments",
    }), "another `_VERSION` for other fields"  # fmt: skip
    assert Counts.of_stored(stored) == counts


def test_a_change_of_the_held_out_file_leaves_the_training_rows(source: Path, tmp_path: Path, tokenizer: Any) -> None:
    held_out = write_rows(tmp_path / "eval.jsonl", TEXTS[:2])
    job = section(source, eval=str(held_out))
    first = prepare(job, tokenizer)
    write_rows(held_out, TEXTS[2:5])
    second = prepare(job, tokenizer)
    assert file_of(second.train) == file_of(first.train)
    assert second.eval_counts is not None
    assert second.eval_counts.rows == 3


def test_the_builtin_rows_are_known_by_their_file() -> None:
    assert sources.contents("builtin:python_docs", "train") == [("builtin:python_docs", cache.digest(python_docs.FILE))]


def fetched(cache_folder: Path, commit: str, rows: list[dict[str, Any]]) -> None:
    """What `datasets` leaves of the hub's `someone/thing` at a commit, which it loads without a network."""
    folder = cache_folder / "someone___thing" / "default" / "0.0.0" / commit
    folder.mkdir(parents=True)
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "thing-train.arrow")) as writer:
        for row in rows:
            writer.write(row)
        examples, size = writer.finalize()
    splits = datasets.SplitDict(dataset_name="thing")
    splits.add(datasets.SplitInfo("train", num_bytes=size, num_examples=examples))
    named = {"builder_name": "json", "dataset_name": "thing", "config_name": "default", "version": "0.0.0"}
    datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(writer.schema), splits=splits, **named
                         ).write_to_directory(str(folder))  # fmt: skip


def test_a_hub_data_set_is_known_by_its_commit(tokenizer: Any, kept: Path) -> None:
    job = DataSection(train="someone/thing", eval="none")
    files = []
    for commit, rows in (("a" * 40, TEXTS[:2]), ("b" * 40, TEXTS[:3])):
        fetched(kept.parent, commit, rows)
        for _ in range(2):
            source_kinds._fetched.cache_clear()  # as in another process
            prepared = prepare(job, tokenizer)
            assert prepared.train_counts.rows == len(rows)
            files.append(file_of(prepared.train))
    assert files[0] == files[1] != files[2] == files[3]


# -- what is not trusted ---------------------------------------------------------------------------------------------


def test_nothing_is_kept_of_rows_with_problems(source: Path, tokenizer: Any, kept: Path) -> None:
    with open(source, "a") as file:
        file.write('{"text": 5}\n')
    for _ in range(2):
        with refusal(DataError, "train.jsonl:10", "`text`"):
            prepare(section(source), tokenizer)
        assert list(kept.iterdir()) == []


def test_a_file_that_changes_while_it_is_read_is_not_kept_under_its_name(kept: Path) -> None:
    keys = iter(["before", "after"])
    made = cache.entry(lambda: next(keys), lambda folder: write_text(folder, "content"))
    assert (made / "file").read_text() == "content"
    assert not (kept / "before").exists()
    assert not (kept / "after").exists()


def write_text(folder: Path, text: str) -> None:
    (folder / "file").write_text(text)


def test_of_two_that_make_the_same_entry_the_second_takes_that_of_the_first(kept: Path) -> None:
    def slow(folder: Path) -> None:
        assert cache.entry(lambda: "key", lambda faster: write_text(faster, "same")) == kept / "key"
        write_text(folder, "same")

    assert cache.entry(lambda: "key", slow) == kept / "key"
    assert [entry.name for entry in kept.iterdir()] == ["key"]
    assert (kept / "key" / "file").read_text() == "same"


def test_an_entry_that_may_be_in_use_is_not_replaced(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, faster = files.flush, []

    def overtaken(made: Path) -> None:
        flush(made)
        if not faster:
            faster.append(made)
            cache.entry(lambda: "key", lambda folder: write_text(folder, "same"))
            faster.append((kept / "key").stat().st_ino)

    monkeypatch.setattr(files, "flush", overtaken)
    found = cache.entry(lambda: "key", lambda folder: write_text(folder, "same"))
    assert found.stat().st_ino == faster[1]


# -- the folder ------------------------------------------------------------------------------------------------------


def test_a_folder_or_entry_that_others_could_have_written_is_not_used(
    source: Path, tokenizer: Any, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = everything(first := prepare(section(source), tokenizer))
    [entry] = kept.iterdir()
    entry.chmod(0o770)
    assert everything(prepare(section(source), tokenizer)) == expected
    [entry] = kept.iterdir()
    assert not_private(entry) is None, "it is made again"
    before = {file: file.stat().st_mtime_ns for file in entry.iterdir()}
    kept.chmod(0o777)
    found = [prepare(section(source), tokenizer) for _ in range(2)]
    assert file_of(first.train) not in {file_of(again.train) for again in found}
    assert [everything(again) for again in found] == [expected] * 2
    assert {file: file.stat().st_mtime_ns for file in entry.iterdir()} == before
    assert len({file_of(again.train) for again in found}) == 1, "for this process it is a cache like any other"
    [message] = caplog.messages
    assert message.startswith(f"{kept} is not used: ")
    assert stat.S_IMODE(cache.folder().stat().st_mode) == 0o700


def test_a_folder_of_the_user_is_private_and_users_do_not_share_one(kept: Path, tmp_path: Path) -> None:
    assert str(os.geteuid()) in kept.name
    folder, link = tmp_path / "real", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to("real")
    assert not_private(folder) is None
    assert not_private(link) is None
    assert not_private(tmp_path / "gone") is not None
    for mode in (0o770, 0o777):
        folder.chmod(mode)
        assert not_private(folder) is not None
        folder.chmod(0o700)
    if os.geteuid() == 0:  # only root may give files away
        os.chown(link, 4321, -1, follow_symlinks=False)
        assert not_private(link) is not None
        os.chown(folder, 4321, -1)
        assert not_private(folder) is not None


@pytest.mark.slow
def test_an_entry_without_a_key_or_a_folder_is_removed_when_the_process_ends(kept: Path, tmp_path: Path) -> None:
    done = elsewhere(kept, None)
    assert Path(done.stdout.strip()).parent == kept
    assert list(kept.iterdir()) == []
    kept.chmod(0o777)  # which may not be used
    (tmp_path / "tmp").mkdir()
    done = elsewhere(kept, "key", start=f"import tempfile; tempfile.tempdir = {str(tmp_path / 'tmp')!r}\n")
    assert Path(done.stdout.strip()).parent.parent == tmp_path / "tmp"
    assert done.stderr.startswith(f"{kept} is not used: other users can write to it")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "tmp").iterdir()) == list(kept.iterdir()) == []


def test_cache_entries_unused_for_long_are_removed_when_one_is_added(source: Path, tokenizer: Any, kept: Path) -> None:
    jobs = [section(source, max_length=length) for length in (50, 60, 70)]
    unused, used = (file_of(prepare(job, tokenizer).train).parent for job in jobs[:2])
    long_ago = time.time() - 31 * 24 * 3600
    for entry in (unused, used):
        for path in (entry, *entry.iterdir()):
            os.utime(path, (long_ago, long_ago))
    prepare(jobs[1], tokenizer)
    prepare(jobs[2], tokenizer)
    assert not unused.exists()
    assert used.exists()


ELSEWHERE = """
import json, resource, signal, sys
from pathlib import Path
from finetune.data import cache
from finetune.errors import FinetuneError

def fill(folder):
    (folder / "file").write_text("content")
    {during}

try:
    print(cache.entry(lambda: {key}, fill))
except FinetuneError as error:
    print(error.exit_code, error)
"""


def elsewhere(kept: Path, key: str | None, during: str = "pass", start: str = "") -> subprocess.CompletedProcess[str]:
    """An entry made in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", start + ELSEWHERE.format(during=during, key=repr(key))],
        env=os.environ | {"HF_DATASETS_CACHE": str(kept.parent), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_killed_process_leaves_no_valid_entry(kept: Path) -> None:
    done = elsewhere(kept, "key", "import os; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    [left] = kept.iterdir()
    assert left.name.startswith(".making-")
    assert cache.entry(lambda: "key", lambda folder: write_text(folder, "whole")) == kept / "key"
    assert (kept / "key" / "file").read_text() == "whole"
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(left, (two_days_ago, two_days_ago))
    cache.entry(lambda: "other", lambda folder: write_text(folder, "whole"))
    assert left.exists(), "its file may still be written"
    os.utime(left / "file", (two_days_ago, two_days_ago))
    cache.entry(lambda: "another", lambda folder: write_text(folder, "whole"))
    assert not left.exists()


WRITER = """from finetune.data.rows import writer
    from finetune.data.encoded import Encoded, Segment
    from finetune.data.sources import Row
    with writer(folder / "rows.arrow") as write:
        for _ in range(100):
            write([(Row("a:1", {}), Encoded((Segment([1] * 10_000, [1] * 10_000),)))])"""


@pytest.mark.slow
def test_a_full_disk_and_a_folder_that_cannot_be_made_are_reported_with_what_to_do(kept: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
    output = elsewhere(kept, "key", WRITER, limit).stdout
    assert output.startswith(f"4 {kept}: the prepared data cannot be written: File too large")
    assert "raise the limit on the size of a file" in output
    assert "free some space" not in output
    assert list(kept.iterdir()) == []
    shutil.rmtree(kept.parent)
    kept.parent.write_text("a file stands in its place")
    with refusal(MachineError, f"{kept}: the prepared data cannot be written: ", "HF_DATASETS_CACHE"):
        cache.entry(lambda: "key", lambda folder: write_text(folder, "content"))


# -- bounded memory --------------------------------------------------------------------------------------------------

MEASURE = """
import sys
from finetune.config import DataSection
from finetune.data.prepare import prepare

class Ids:
    special_tokens_map, init_kwargs, chat_template, is_fast = {}, {}, None, False
    get_vocab = dict
    def __len__(self):
        return 100
    def decode(self, ids, **_):
        return str(ids)

def peak_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

prepare(DataSection(train=sys.argv[1], eval="none", max_length=2**14), Ids())
before = peak_bytes()
prepared = prepare(DataSection(train=sys.argv[2], eval="none", max_length=2**14), Ids())
print(prepared.train_counts.tokens, peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_more_rows_take_no_more_memory(tmp_path: Path) -> None:
    """20 times as many rows of 10,000 tokens; as lists, their ids and labels alone would take 64 MB."""
    row = {"input_ids": [17, 18, 19, 20] * 2500}
    small, large = (write_rows(tmp_path / f"{count}.jsonl", [row] * count) for count in (20, 400))
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    tokens, grown = map(int, done.stdout.split())
    assert tokens == 4_000_000
    assert grown < 30 * 2**20
