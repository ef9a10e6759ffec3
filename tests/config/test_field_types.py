"""Facts about the field types: sizes in bytes, the checkpointing choice, and unknown names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import refusal
from pydantic import ValidationError

from finetune.config import MemorySection, dump, load
from finetune.config.field_types import every_n, parse_size, unknown
from finetune.errors import ConfigError


def test_a_size_is_in_binary_units(subtests: pytest.Subtests) -> None:
    for written, size_bytes in [
        ("24GiB", 24 * 2**30), ("24 GiB", 24 * 2**30), (" 512 MiB ", 512 * 2**20), ("1.5GiB", 3 * 2**29),
        ("1TiB", 2**40), ("3KiB", 3072), ("7B", 7), (1000, 1000),
    ]:  # fmt: skip
        with subtests.test(written=written):
            assert MemorySection(limit=written).limit == size_bytes


def test_a_size_is_text_with_a_unit_or_a_whole_number_above_zero(subtests: pytest.Subtests) -> None:
    for written in ["24GB", "24", "24gib", "GiB", "-1GiB", "1e3MiB", "24 G", "1,5GiB"]:
        with subtests.test(written=written), pytest.raises(ValidationError, match="KiB, MiB, GiB or TiB"):
            MemorySection(limit=written)
    for written in [1.5, True, [1], 0, -5, "0GiB", "9" * 400 + "GiB"]:
        with subtests.test(written=written), pytest.raises(ValidationError):
            MemorySection(limit=written)


@given(st.integers(0, 2**20), st.sampled_from([("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)]))
def test_a_whole_number_of_a_unit_is_exact(number: int, unit: tuple[str, int]) -> None:
    name, power = unit
    assert parse_size(f"{number}{name}") == number << power


def test_checkpointing_takes_its_forms(subtests: pytest.Subtests) -> None:
    for written in ["none", "all", "keep-both", "every-1", "every-12", 0, 5, {"all": 3, "none": 2}]:
        with subtests.test(written=written):
            assert MemorySection(checkpointing=written).checkpointing == written


def test_checkpointing_takes_nothing_else(subtests: pytest.Subtests) -> None:
    for written in ["every-0", "every-", "every-02", "every2", "some", "every-2\n", -1, True, 2.5, None, {},
                    {"some": 2}, {"all": -1}, {"all": "2"}, {"auto": 2}]:  # fmt: skip
        with subtests.test(written=written), pytest.raises(ValidationError):
            MemorySection(checkpointing=written)


def test_every_n_gives_the_n_of_that_form_alone() -> None:
    assert [every_n(form) for form in ("every-3", "every-12", "all", "none", 4)] == [3, 12, None, None, None]


def test_an_unknown_name_gets_the_nearest_one_and_the_list() -> None:
    names = ["linear", "cosine"]
    assert unknown("cosin", names) == "`cosin` is not known; did you mean `cosine`? choose from linear, cosine"
    assert unknown("zzz", names) == "`zzz` is not known; choose from linear, cosine"
    assert unknown("score", []) == "`score` is not known; there are none"


def test_of_very_many_names_the_first_are_listed() -> None:
    """A mistyped file in a folder of shards."""
    said = unknown("part-00777.json", [f"part-{number:05}.jsonl" for number in range(1000)])
    assert said.startswith(
        "`part-00777.json` is not known; did you mean `part-00777.jsonl`? choose from part-00000.jsonl"
    )
    assert said.endswith("part-00049.jsonl and 950 more")


def test_a_path_begins_at_home_where_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for key in ["model.name", "model.tokenizer", "data.train", "data.eval", "output.dir"]:
        with subtests.test(key=key):
            monkeypatch.setenv("HOME", "/home/someone")
            (tmp_path / "job.yaml").write_text("")
            config = load(tmp_path / "job.yaml", [f"{key}=~/x", "data.chat_template=~/own.jinja"])
            section, name = key.split(".")
            assert getattr(getattr(config, section), name) == "/home/someone/x"
            assert config.data.chat_template == "/home/someone/own.jinja"
            (tmp_path / "saved.yaml").write_text(dump(config))
            monkeypatch.setenv("HOME", "/home/another")
            assert load(tmp_path / "saved.yaml") == config


def test_a_path_longer_than_any_system_takes_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for key in ["model.name", "model.tokenizer", "data.train", "output.dir", "data.chat_template"]:
        for path in ["x" * 256, "é" * 128, "a/" * 2_048 + "b"]:
            with subtests.test(key=key, path=path):
                (tmp_path / "job.yaml").write_text("")
                with refusal(ConfigError, f"`{key}`"):
                    load(tmp_path / "job.yaml", [f"{key}={path}"])


def test_the_home_of_an_unknown_user_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("output: {dir: ~no-such-user-here/x}")
    with refusal(ConfigError, "there is no such user"):
        load(tmp_path / "a.yaml")
