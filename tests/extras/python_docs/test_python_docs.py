"""Facts about the built-in rows: their two sides share nothing, and the script in data/ makes them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest

from finetune.extras.python_docs import rows as python_docs

conversations = functools.cache(python_docs.conversations)


def question(row: dict[str, Any]) -> str:
    return row["messages"][0]["content"]


def answer(row: dict[str, Any]) -> str:
    return row["messages"][1]["content"]


def name(row: dict[str, Any]) -> str:
    (quoted,) = re.findall(r"`([^`]+)`", question(row))
    return quoted


def on_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.long
@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the file was made by Python 3.11.7")
def test_the_script_makes_the_file_wherever_it_runs(tmp_path: Path) -> None:
    # With another hash seed and directory, and a decoy of a standard module on its path.
    (tmp_path / "zipapp.py").write_text("raise SystemExit('this is not the standard library')")
    subprocess.run(
        [sys.executable, harness.ROOT / "data" / "build_python_docs.py", "--output", "made.gz"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "12345"}, check=True,
    )  # fmt: skip
    assert (tmp_path / "made.gz").read_bytes() == python_docs.FILE.read_bytes()


def test_a_row_is_a_question_about_a_public_name_and_its_first_sentences() -> None:
    rows = conversations("train") + conversations("eval")
    assert (len(rows), len(conversations("eval"))) == (4245, 339)
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert not any(part.startswith("_") for part in name(row).split("."))
        text = answer(row)
        assert 24 <= len(text) <= 300
        assert text == on_one_line(text)
        assert text[-1] in ".!?)"
    names = [name(row) for row in rows]
    assert len(set(names)) == len({answer(row) for row in rows}) == len(rows)
    assert names == sorted(names[:3906]) + sorted(names[3906:])
    [known] = [row for row in rows if name(row) == "textwrap.dedent"]
    assert answer(known) == "Remove any common leading whitespace from every line in `text`."


@pytest.mark.slow
def test_nothing_held_out_is_in_a_training_text_of_the_rows_or_of_the_base() -> None:
    names = {name(row) for row in conversations("eval")}
    trained = harness.documents()["train"]
    assert names.isdisjoint(name(row) for row in conversations("train"))
    assert names.isdisjoint(re.split(r"[\n(]", text, maxsplit=1)[0] for text in trained)
    texts = [*map(question, conversations("train")), *map(answer, conversations("train")), *trained]
    # Spelled out in running text, only dotted names are unmistakable: `re` and `copy` are everyday words.
    assert names.isdisjoint(re.findall(r"\w+(?:\.\w+)+", "\n".join(texts)))
    text = "\n".join(map(on_one_line, texts))
    assert [answer(row) for row in conversations("eval") if answer(row) in text] == []

    def body(text: str) -> str:
        return on_one_line(text.partition("\n\n")[2])

    held_out = harness.documents()["eval"]
    assert {*map(body, trained)}.isdisjoint(map(body, held_out))
    # Documents hold private objects, and nothing that differs between installations.
    assert any(text.startswith("_collections_abc.") for text in trained)
    where = os.path.dirname(os.__file__)
    assert not any(re.search(r" at 0x[0-9a-f]{6}", text) or where in text for text in [*trained, *held_out])


def test_pairs_are_the_questions_with_an_answer_and_the_same_words_out_of_order() -> None:
    for split, rows in (("train", conversations("train")), ("eval", conversations("eval"))):
        made = python_docs.pairs(split)
        assert [[*row["prompt"], *row["chosen"]] for row in made] == [row["messages"] for row in rows]
        texts = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in made]
        assert all(sorted(good.split()) == sorted(bad.split()) for good, bad in texts)
        assert all(good != bad for good, bad in texts)
