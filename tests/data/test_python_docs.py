"""Facts about the built-in data set: it repeats exactly, and its two sides share nothing."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.data import python_docs

conversations = functools.cache(python_docs.conversations)
REPOSITORY = Path(__file__).parents[2]

DIGEST_PROGRAM = """
import hashlib, json, sys
from finetune.data import python_docs
splits = ("train", "eval")
texts = [[python_docs.conversations(split), list(python_docs.documents(split))] for split in splits]
print(hashlib.sha256(json.dumps(texts).encode()).hexdigest())
assert "mailbox" not in sys.modules, "the documented modules were imported into the calling process"
"""


def question(row: dict) -> str:
    return row["messages"][0]["content"]


def answer(row: dict) -> str:
    return row["messages"][1]["content"]


def name(row: dict) -> str:
    (quoted,) = re.findall(r"`([^`]+)`", question(row))
    return quoted


def on_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_another_process_builds_the_same_rows_without_a_trace(tmp_path: Path) -> None:
    # The other process has another hash seed and directory, and a decoy of a standard module on its path.
    (tmp_path / "zipapp.py").write_text("raise SystemExit('this is not the standard library')")
    search_path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    other = subprocess.run(
        [sys.executable, "-P", "-c", DIGEST_PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": search_path, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=False,
    )
    splits = ("train", "eval")
    texts = [[python_docs.conversations(split), list(python_docs.documents(split))] for split in splits]
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    assert (other.stdout.strip(), other.stderr) == (digest, "")


def test_changing_returned_rows_leaves_the_data_set_alone() -> None:
    question_before = question(conversations("train")[0])
    python_docs.conversations("train")[0]["messages"][0]["content"] = "changed"
    assert question(python_docs.conversations("train")[0]) == question_before


def test_there_are_thousands_of_rows_and_about_a_twelfth_is_held_out() -> None:
    assert 3000 <= len(conversations("train")) + len(conversations("eval")) <= 6000
    assert 0.06 < len(conversations("eval")) / (len(conversations("train")) + len(conversations("eval"))) < 0.10


def test_a_row_is_one_question_and_one_answer() -> None:
    for row in conversations("train") + conversations("eval"):
        assert row.keys() == {"messages"}
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message.keys() == {"role", "content"} for message in row["messages"])


def test_answers_are_whole_sentences_on_one_line_of_bounded_length() -> None:
    for row in conversations("train") + conversations("eval"):
        text = answer(row)
        assert python_docs.MIN_ANSWER_CHARS <= len(text) <= python_docs.MAX_ANSWER_CHARS
        assert text == on_one_line(text)
        assert text[-1] in ".!?)"


def test_a_known_function_has_the_expected_row() -> None:
    rows = {name(row): row for row in conversations("train") + conversations("eval")}
    expected = "Remove any common leading whitespace from every line in `text`."
    assert answer(rows["textwrap.dedent"]) == expected


def test_names_answers_and_order() -> None:
    names = [name(row) for row in conversations("train") + conversations("eval")]
    answers = [answer(row) for row in conversations("train") + conversations("eval")]
    assert len(set(names)) == len(names)
    assert len(set(answers)) == len(answers)
    assert [name(row) for row in conversations("train")] == sorted(name(row) for row in conversations("train"))


def test_no_held_out_answer_is_in_any_training_text() -> None:
    training_text = "\n".join(
        [answer(row) for row in conversations("train")] + [on_one_line(text) for text in python_docs.documents("train")]
    )
    assert [answer(row) for row in conversations("eval") if answer(row) in training_text] == []


def test_no_held_out_document_is_a_training_document() -> None:
    def body(text: str) -> str:
        return on_one_line(text.partition("\n\n")[2])

    train_bodies = {body(text) for text in python_docs.documents("train")}
    assert [text for text in python_docs.documents("eval") if body(text) in train_bodies] == []


def test_no_held_out_name_is_in_any_training_text() -> None:
    held_out = {name(row) for row in conversations("eval")}
    documents = list(python_docs.documents("train"))
    assert held_out.isdisjoint(name(row) for row in conversations("train"))
    assert held_out.isdisjoint(re.split(r"[\n(]", text, maxsplit=1)[0] for text in documents)
    # Spelled out in running text, only dotted names are unmistakable: `re` and `copy` are everyday words.
    training_text = "\n".join(
        [*map(question, conversations("train")), *map(answer, conversations("train")), *documents]
    )
    assert held_out.isdisjoint(re.findall(r"\w+(?:\.\w+)+", training_text))


def test_private_objects_are_documented_but_not_asked_about() -> None:
    assert not any(
        part.startswith("_") for row in conversations("train") + conversations("eval") for part in name(row).split(".")
    )
    assert any(text.startswith("_collections_abc.") for text in python_docs.documents("train"))


def test_texts_hold_nothing_that_differs_between_runs_or_installations() -> None:
    installation = os.path.dirname(os.__file__)
    for split in ("train", "eval"):
        for text in python_docs.documents(split):
            assert not re.search(r" at 0x[0-9a-f]{6}", text)
            assert installation not in text


def test_pairs_are_the_questions_with_an_answer_and_the_same_words_out_of_order() -> None:
    for split, rows in (("train", conversations("train")), ("eval", conversations("eval"))):
        made = python_docs.pairs(split)
        assert [[*row["prompt"], *row["chosen"]] for row in made] == [row["messages"] for row in rows]
        texts = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in made]
        assert all(sorted(good.split()) == sorted(bad.split()) for good, bad in texts)
        assert all(good != bad for good, bad in texts)
