"""Facts about the splits of folders, patterns and data sets of the hub: what is trained, evaluates, or is left out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from jobs import write_rows
from messages import refusal

from finetune.config import DataSection, Source
from finetune.data import sources, splits
from finetune.data.prepare import Prepared, prepare
from finetune.data.problems import Problems
from finetune.data.source_kinds import HubDataSet
from finetune.errors import DataError
from finetune.report import words

CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: [first/*, second/part.jsonl]
  - split: dev
    path: held/*
- config_name: other
  data_files: other/*
---
# Rows
"""

LAYOUTS: dict[str, tuple[Iterable[str], Iterable[str], Iterable[str]]] = {
    # name: (files of the training split, of the one for validation, others)
    "names": (["train.jsonl"], ["validation.jsonl"], ["test.jsonl"]),
    "words": (["my_train_file.jsonl"], ["my-dev.jsonl"], ["eval 1.jsonl", "extra.jsonl"]),
    "shards": (
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
        ["valid-00000-of-00001.jsonl"],
        ["test-00000-of-00002.jsonl"],
    ),
    "data": (["data/train-00000-of-00001.jsonl"], ["data/validation-00000-of-00001.jsonl"], ["data/x.jsonl"]),
    "folders": (["train/a.jsonl", "train/test.jsonl"], ["validation/a.jsonl"], ["test/a.jsonl", "a.jsonl"]),
    "inner folders": (["en/training/a.jsonl", "de/training/a.jsonl"], ["en/val/a.jsonl"], ["en/testing/a.jsonl"]),
    "card": (["first/a.jsonl", "second/part.jsonl"], ["held/a.jsonl"], ["train.jsonl", "other/a.jsonl"]),
}


def laid_out(folder: Path, files: Iterable[str]) -> Path:
    """Rows that each name their file."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / name, [{"text": f"{name} {number}"} for number in range(3)])
    return folder


def of_layout(folder: Path, name: str) -> Path:
    if name == "card":
        folder.mkdir()
        (folder / "README.md").write_text(CARD)
    return laid_out(folder, itertools.chain(*LAYOUTS[name]))


def files_read(source: Any, split: str = "train") -> list[str]:
    return list(dict.fromkeys(row.fields["text"].rpartition(" ")[0] for row in sources.rows(source, split)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_reads_the_training_split_alone_and_evaluation_the_one_for_validation(
    name: str, tmp_path: Path
) -> None:
    folder = of_layout(tmp_path / "corpus", name)
    train, validation, _ = LAYOUTS[name]
    assert files_read(str(folder)) == sorted(train)
    assert files_read(str(folder), "eval") == sorted(validation)
    assert sources.kind_of(str(folder)).holds_out(str(folder))
    if name != "shards":  # a pattern over several splits reads what its folder does
        assert files_read(f"{folder}/**/*.jsonl") == sorted(train)
        assert files_read(f"{folder}/**/*.jsonl", "eval") == sorted(validation)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_splits_are_those_that_datasets_loads(name: str, tmp_path: Path) -> None:
    import datasets

    folder = of_layout(tmp_path / "corpus", name)
    loaded = datasets.load_dataset_builder(str(folder), name="default" if name == "card" else None).config.data_files
    held_out = next(split for split in loaded if str(split) in ("validation", "dev"))
    for split, files in (("train", loaded["train"]), ("eval", loaded[held_out])):
        assert files_read(str(folder), split) == sorted(str(Path(file).relative_to(folder)) for file in files)


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("te*.jsonl", None),
        ("test*.jsonl", ["test.jsonl", "test_train.jsonl"]),
        ("*_train.*", ["test_train.jsonl"]),
        ("test.jsonl", ["test.jsonl"]),
        ("inner/**/*.jsonl", ["inner/train.jsonl"]),
        ("inner/[dt]e*/*.jsonl", ["inner/deep/a.jsonl"]),
        ("*/test/*", ["inner/test/a.jsonl"]),
    ],
)
def test_a_test_is_trained_only_where_a_file_or_a_pattern_names_it(
    pattern: str, files: list[str] | None, tmp_path: Path
) -> None:
    folder = laid_out(
        tmp_path / "corpus",
        ["train.jsonl", "test.jsonl", "test_train.jsonl", "inner/train.jsonl", "inner/test/a.jsonl"],
    )
    laid_out(folder, ["inner/deep/a.jsonl"] if "deep" in str(files) else [])
    if files is None:
        with refusal(DataError, "no training split, only test"):
            files_read(f"{folder}/{pattern}")
    else:
        assert files_read(f"{folder}/{pattern}") == files


def test_a_folder_of_any_other_names_is_read_whole(tmp_path: Path) -> None:
    files = ["a.jsonl", "latest.jsonl", "contest/trainer.jsonl", "devices.jsonl"]
    folder = laid_out(tmp_path / "test" / "train[1]", files)
    assert files_read(str(folder)) == sorted(files)
    assert not sources.kind_of(str(folder)).holds_out(str(folder))
    assert splits.of_files(tmp_path, []) == {}


def test_a_folder_gives_its_splits_else_what_is_of_none(tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "corpus", ["a.jsonl", "b.jsonl", "test.jsonl", "train-and-test.jsonl"])
    assert files_read(str(folder)) == ["a.jsonl", "b.jsonl"]
    assert files_read(str(folder), "eval") == ["test.jsonl", "train-and-test.jsonl"]
    folder = tmp_path / "other"  # evaluates its validation, else its tests, else all
    for name in ("train.jsonl", "test.jsonl", "dev.jsonl"):
        assert files_read(str(laid_out(folder, [name])), "eval") == [name]


def test_a_folder_without_one_training_split_is_refused(tmp_path: Path) -> None:
    for number, (files, reason) in enumerate((
        (["test.jsonl", "val.jsonl"], "no training split, only test and validation"),
        (["data/train_sft-00000-of-00001.jsonl", "data/train_gen-00000-of-00001.jsonl"], "train_gen, train_sft"),
        (["train-00000-of-00002.jsonl", "test-00000-of-00001.jsonl"], "only 1 of 2 files"),
    )):  # fmt: skip
        with refusal(DataError, reason):
            sources.rows(str(laid_out(tmp_path / f"corpus{number}", files)))


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("", ["test.jsonl"]),
        ("", ["latest-test.jsonl", "my val.jsonl"]),
        ("te*.jsonl", ["test_1.jsonl", "test_2.jsonl"]),
        ("*/a.jsonl", ["test/a.jsonl", "dev/a.jsonl"]),
        ("[t]est*.jsonl", ["test [1].jsonl"]),
        ("", ["data/train_sft-00000-of-00001.jsonl", "data/train_gen-00000-of-00001.jsonl"]),
        ("", ["one.jsonl", "two.jsonl", "README.md"]),  # which describes them as tests
        ("*.jsonl", ["one.jsonl", "two.jsonl", "README.md"]),
    ],
)
def test_the_file_that_a_refusal_of_splits_advises_is_read(source: str, files: list[str], tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "corpus", [file for file in files if file != "README.md"])
    if "README.md" in files:
        card = "---\nconfigs: [{config_name: default, data_files: [{split: test, path: '*.jsonl'}]}]\n---\n"
        (folder / "README.md").write_text(card)
    with refusal(DataError, "training split") as refused:
        sources.rows(str(folder / source))
    [advised] = re.findall(r"such as `(.*)`", str(refused.value))
    assert str(Path(advised).relative_to(folder)) in files
    for key in ("train", "eval"):
        assert files_read(advised, key) == [str(Path(advised).relative_to(folder))]


UNREADABLE = {
    "README.md": [
        "configs: [{config_name: a, data_files: a.jsonl}, {config_name: b}]",
        "configs: [{config_name: a, data_files: gone/*}]",
        "configs: [{config_name: a, data_files: ['https://host/a.jsonl', gone/*]}]",
        "configs: [{config_name: a, data_files: '" + "*a" * 40 + "b'}]",
        "configs: [{config_name: a, data_files: 5}]",
        "configs: 5",
        "configs: [",
        "configs: [{config_name: a, data_dir: 5}]",
    ],
    "dataset_dict.json": ["{", "[]"],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_splits_that_cannot_be_read_are_refused_and_name_their_file(name: str, tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "corpus", ["a.jsonl", "a" * 80 + ".jsonl"])
    for text in UNREADABLE[name]:
        (folder / name).write_text(f"---\n{text}\n---\n" if name == "README.md" else text)
        with refusal(DataError, name):
            sources.rows(str(folder))


def test_the_readme_of_a_corpus_describes_nothing(tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "corpus", ["a.jsonl"])
    elsewhere = "---\nconfigs: [{config_name: a, data_files: 'https://host/a.jsonl'}]\n---\n"
    in_prose = "---\ntitle: a: b\n---\nThe configs: of é\n"
    for text in ("# Rows\n", "---\ntitle: Rows\n---\n", "", elsewhere, in_prose):
        (folder / "README.md").write_text(text, encoding="latin-1")
        assert files_read(str(folder)) == ["a.jsonl"]


def test_a_readme_may_describe_a_split_that_is_not_here_and_patterns_of_eight_stars(tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "corpus", ["aaaaaaaa.jsonl", "b.jsonl"])
    train, validation = f"{{split: train, path: '{'*a' * 8}.jsonl'}}", "{split: validation, path: gone/*}"
    (folder / "README.md").write_text(f"---\nconfigs: [{{config_name: a, data_files: [{train}, {validation}]}}]\n---\n")
    assert files_read(str(folder)) == ["aaaaaaaa.jsonl"]


def test_a_pattern_takes_files_of_one_of_several_data_sets(tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "corpus", ["en-1.jsonl", "en-2.jsonl", "fr.jsonl"])
    configs = "[{config_name: en, data_files: 'en*'}, {config_name: fr, data_files: fr.jsonl}]"
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    assert files_read(f"{folder}/en-*.jsonl") == ["en-1.jsonl", "en-2.jsonl"]
    with refusal(DataError, "several data sets, en, fr"):
        sources.rows(str(folder))


def test_a_folder_within_a_data_set_may_be_its_base(tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "corpus", ["en/train.jsonl", "en/test.jsonl", "de/train.jsonl"])
    (folder / "README.md").write_text("---\nconfigs: [{config_name: en, data_dir: en}]\n---\n")
    assert files_read(str(folder)) == ["en/train.jsonl"]


def test_a_saved_dataset_dict_has_the_splits_of_its_folders(tmp_path: Path) -> None:
    import datasets

    made = {name: datasets.Dataset.from_dict({"text": [f"{name} 0"]}) for name in ("train", "test", "held")}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    assert files_read(str(tmp_path / "saved")) == ["train"]
    assert files_read(str(tmp_path / "saved"), "eval") == ["test"]
    assert set(splits.of_files(tmp_path / "saved", [*(tmp_path / "saved").glob("*/*.arrow")])) == {*made}


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--someone--rows"
    blobs = laid_out(repository / "blobs", ["data/train-0.jsonl", "data/test-0.jsonl"]) / "data"
    snapshot = repository / "snapshots" / "0123" / "data"
    snapshot.mkdir(parents=True)
    for name in ("train", "test"):
        (blobs / f"{name}-0.jsonl").rename(repository / "blobs" / f"hash-of-{name}")
        (snapshot / f"{name}-00000-of-00001.jsonl").symlink_to(f"../../../blobs/hash-of-{name}")
    for folder in (snapshot, snapshot.parent):
        assert files_read(str(folder)) == ["data/train-0.jsonl"]


@pytest.mark.slow
def test_a_data_set_of_the_hub_has_its_validation_held_out(tmp_path: Path) -> None:
    folder = str(laid_out(tmp_path / "corpus", ["train.jsonl", "validation.jsonl", "test.jsonl"]))  # stands for a name
    train, held_out = (
        list(HubDataSet().records(folder, split, f"data.{split}", Problems(), None)) for split in ("train", "eval")
    )
    assert {fields["text"][:5] for _, fields, _ in train} == {"train"}
    assert [location for location, *_ in held_out] == [f"{folder}[validation]:{number}" for number in (1, 2, 3)]


# -- prepared rows ---------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(word_tokenizer: Callable[..., Any]) -> Callable[..., Prepared]:
    return lambda **data: prepare(DataSection(**data), word_tokenizer(None))


def places(rows: Any) -> set[str]:
    return {Path(place.rpartition(":")[0]).name for place in rows["place"][:]} if rows else set()


def test_a_run_trains_and_evaluates_by_splits_and_says_what_it_left(tmp_path: Path, prepared: Any) -> None:
    folder = laid_out(tmp_path / "corpus", ["train.jsonl", "validation.jsonl", "test.jsonl", "more.jsonl"])
    data = prepared(train=str(folder))
    assert (places(data.train), places(data.eval)) == ({"train.jsonl"}, {"validation.jsonl"})
    assert [(one.use, one.names, one.files, one.rows) for one in data.splits] == [
        ("train", ("train",), 1, 3),
        ("eval", ("validation",), 1, 3),
        ("none", ("test",), 1, None),
        ("none", ("",), 1, None),
    ]
    assert "more.jsonl" in words.splits(data.splits)
    data = prepared(train=str(folder), eval=f"{folder}/test.jsonl")
    assert (places(data.train), places(data.eval)) == ({"train.jsonl"}, {"test.jsonl"})
    assert [one.names for one in data.splits if one.use == "none"] == [("validation",), ("",)]


def test_a_source_with_a_split_for_validation_gives_it_and_another_a_share_by_hash(
    tmp_path: Path, prepared: Any
) -> None:
    folder = laid_out(tmp_path / "corpus", ["train.jsonl", "validation.jsonl"])
    other = write_rows(tmp_path / "other.jsonl", [{"text": f"row {number}"} for number in range(100)])
    data = prepared(train=[str(folder), Source(source=str(other), weight=2)])
    assert places(data.train) == {"train.jsonl", "other.jsonl"}
    assert places(data.eval) == {"validation.jsonl", "other.jsonl"}
    assert len(data.train) + len(data.eval) == 3 + 3 + 200
    trained, held_out = (set(rows["place"][:]) for rows in (data.train, data.eval))
    assert not trained & held_out


def test_a_split_that_appears_later_is_not_hidden_by_the_cache(tmp_path: Path, prepared: Any) -> None:
    folder = laid_out(tmp_path / "corpus", ["train.jsonl"])
    assert len(prepared(train=str(folder)).train) < 3
    laid_out(folder, ["validation.jsonl"])
    assert len(prepared(train=str(folder)).train) == 3
    with refusal(DataError, "validation.jsonl:"):  # its rows are not trained too
        prepared(train=[str(folder), f"{folder}/validation.jsonl"])


def test_a_file_of_the_first_split_is_named_where_files_are_known() -> None:
    for found, cure in (
        ({"train_a": ["a.jsonl"], "train_b": ["b.jsonl"]}, "such as `a.jsonl`"),
        ({"test": ["t.jsonl", "u.jsonl"]}, "such as `t.jsonl`"),
        ({"test": None}, "hf download"),
    ):
        with refusal(DataError, cure):
            splits.chosen(found, "train", "rows")
