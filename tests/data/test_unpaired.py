"""Facts about answers labelled good or bad: their layouts, what is refused or dropped, and the answers to others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jobs import write_rows
from messages import refusal

import finetune
from finetune.choices import load_config
from finetune.config import Config
from finetune.data import mismatched
from finetune.data.encoded import IGNORE, segments_of
from finetune.data.examples import Chat, Completion, RowError, Unusable
from finetune.data.formats import FORMATS, holds_labelled_answers, read
from finetune.data.mismatched import exchanged
from finetune.data.prepare import Prepared, prepare, questions
from finetune.errors import DataError
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives.contract import check_rows

ASK = {"role": "user", "content": "Why?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Because.", "No."))
SAID = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
CHAT = Chat([ASK, GOOD])

LAYOUTS: list[tuple[str, dict[str, Any], Any]] = [
    ("TRL", {"prompt": "Why? ", "completion": "Because."}, Completion("Why? ", "Because.")),
    ("TRL, messages", {"prompt": [ASK], "completion": [GOOD]}, CHAT),
    ("LLaMA-Factory, ShareGPT", {"conversations": SAID}, CHAT),
    ("LLaMA-Factory, OpenAI", {"messages": [ASK, GOOD]}, CHAT),
    ("LLaMA-Factory, Alpaca", {"instruction": "Why?", "input": "", "output": "Because."}, CHAT),
    ("Axolotl, Argilla", {"instruction": "Why?", "completion": "Because."}, CHAT),
    ("Axolotl, Intel", {"system": "", "question": "Why?", "completion": "Because."}, CHAT),
    ("of several turns", {"messages": [ASK, BAD, ASK, GOOD]}, Chat([ASK, BAD, ASK, GOOD], frozenset({1}))),
]


def test_an_answer_is_read_in_each_published_layout() -> None:
    for name, row, expected in LAYOUTS:
        for label, value in (("label", True), ("kto_tag", False)):
            content, unused = read({**row, label: value}, "unpaired", {})
            read_as = (dict(content.segments), content.values, unused)
            assert read_as == ({"answer": expected}, {"desirable": float(value)}, []), name


def test_a_row_that_is_not_a_labelled_answer_is_refused_with_the_field() -> None:
    for row, named in (
        ({"prompt": "Why?", "completion": "So."}, "`label` must be true for a desirable answer .* it is missing"),
        ({"prompt": "Why?", "completion": "So.", "label": 1}, "`label` must be true .*; not a number"),
        ({"prompt": "Why?", "completion": "So.", "label": "true"}, "a boolean of JSON or Parquet; not text"),
        ({"conversations": SAID, "kto_tag": "good"}, "`kto_tag` must be true"),
        ({"completion": "So.", "label": True}, "there is no `prompt`"),
        ({"messages": [GOOD], "label": True}, "there is no `prompt`"),
        ({"messages": [ASK, GOOD, ASK], "label": True}, "`messages` must end with the assistant's answer"),
        ({"prompt": "Why?", "label": True}, "`completion` is missing"),
        ({"prompt": "Why?", "completion": "So.", "label": True, "images": ["a.png"]}, "`images`"),
    ):
        with pytest.raises(RowError, match=named):
            read(row, "unpaired", {})
    with pytest.raises(Unusable, match="equal answers"):
        read({"prompt": "Why?", "chosen": "So.", "rejected": "So."}, "unpaired", {})


def test_each_wrong_row_of_a_file_is_named(tmp_path: Path) -> None:
    rows = answers(5)
    rows[1]["label"], rows[3]["completion"] = "good", 7
    with refusal(DataError, "rows.jsonl:2: `label` must be true", "rows.jsonl:4: `completion` must be text"):
        prepared(tmp_path, rows)


# -- answers to other prompts ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=2, max_size=40))
def test_no_prompt_meets_its_own_answer_and_each_answer_is_taken_about_once(rows: list[tuple[int, int]]) -> None:
    prompts, lengths = zip(*rows, strict=True)
    most = max(Counter(prompts).values())
    assume(most < len(rows))
    partners = exchanged(prompts, lengths)
    assert all(prompts[row] != prompts[other] for row, other in enumerate(partners))
    if 2 * most <= len(rows):
        assert sorted(partners) == list(range(len(rows)))


def test_answers_are_exchanged_among_those_of_similar_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatched, "_WINDOW_ROWS", 8)
    lengths = [37 * number % 101 for number in range(101)]
    partners = exchanged(range(101), lengths)
    assert sorted(partners) == list(range(101)), "an odd number as well"
    assert max(abs(lengths[row] - lengths[other]) for row, other in enumerate(partners)) < 16


def prepared(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> tuple[Config, Prepared]:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    section = {"train": str(file), "eval": "none", **data}
    config = load_config({"data": section, "training": {"objective": "kto"}, "model": {"name": "builtin:tiny-llama"}})
    return config, prepare(config.data, load_tokenizer(config.model, config.data))


def answers(number: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"To {n}. ", "completion": "yes " * (1 + n % 5), "label": n % 2 == 0, "kind": "a"}
        for n in range(number)
    ]


def test_a_row_has_its_answer_and_one_to_another_prompt(tmp_path: Path) -> None:
    config, data = prepared(tmp_path, answers(9))
    assert (config.data.format, config.data.too_long) == ("unpaired", "drop")
    check_rows("kto", data.layout, 1)
    ends = []
    for row in data.train:
        answer, other = segments_of(row)
        start = sum(label == IGNORE for label in answer.labels)
        assert other.input_ids[:start] == answer.input_ids[:start]
        assert other.labels[:start] == [IGNORE] * start
        assert other.labels[start:] == other.input_ids[start:]
        ends.append((tuple(answer.input_ids[start:]), tuple(other.input_ids[start:])))
    assert Counter(own for own, _ in ends) == Counter(shown for _, shown in ends), "each answer is shown once"
    assert data.train["desirable"][:] == [float(n % 2 == 0) for n in range(9)]
    counts = data.train_counts
    assert counts.segments == {
        name: sum(row["segments"][at] for row in data.train) for at, name in enumerate(("answer", "mismatched"))
    }
    assert counts.traits.unused == ["kind"]


def test_the_look_at_the_data_shows_the_label_of_an_answer(tmp_path: Path) -> None:
    config, _ = prepared(tmp_path, answers(2))
    shown = [sample.place.partition(":")[2] for sample in finetune.inspect_data(config).inspection.samples]
    ends = ("desirable", "undesirable")
    assert shown == [f"{n + 1} ({end}), {name}" for n, end in enumerate(ends) for name in ("answer", "mismatched")]


def test_both_answers_of_a_pair_are_rows_and_what_is_empty_or_too_long_is_dropped_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"To {n}. ", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(6)]
    rows[1]["rejected"] = " "
    rows[2]["chosen"] = "yes " * 200
    rows[3] = {"prompt": "Ask. ", "completion": "so", "label": False}
    rows[4]["chosen"] = rows[4]["rejected"]
    _, data = prepared(tmp_path, rows, max_length=64)
    places = {row.place.rpartition("/")[2]: row.why for row in data.train_counts.affected}
    assert places == {
        "rows.jsonl:2, rejected": "empty answer",
        "rows.jsonl:3, chosen": "over data.max_length",
        "rows.jsonl:5": "equal answers",
    }
    found = [(place.rpartition("/")[2], desirable) for place, desirable in zip(
        data.train["place"][:], data.train["desirable"][:], strict=True
    )]  # fmt: skip
    assert found == [
        ("rows.jsonl:1, chosen", 1), ("rows.jsonl:1, rejected", 0), ("rows.jsonl:2, chosen", 1),
        ("rows.jsonl:3, rejected", 0), ("rows.jsonl:4", 0), ("rows.jsonl:6, chosen", 1), ("rows.jsonl:6, rejected", 0),
    ]  # fmt: skip


def test_an_answer_to_another_prompt_that_would_be_too_long_is_cut(tmp_path: Path) -> None:
    rows = answers(8)
    rows[0] |= {"prompt": "To " + "and " * 40, "completion": "yes"}
    rows[1]["completion"] = "yes " * 20
    _, data = prepared(tmp_path, rows, max_length=64)
    assert len(data.train) == 8
    longest = [max(row["segments"]) for row in data.train]
    assert (longest[0], data.train_counts.longest) == (64, max(longest))
    assert segments_of(data.train[0])[1].trained > 1


def test_rows_of_a_single_prompt_are_refused_and_not_an_evaluation_set(tmp_path: Path) -> None:
    same = [{"prompt": "To. ", "completion": f"yes {n}", "label": True} for n in range(6)]
    with refusal(DataError, "`data.train`"):
        prepared(tmp_path, same)
    held_out = write_rows(tmp_path / "held_out.jsonl", same)
    with refusal(DataError, "`data.eval`"):
        prepared(tmp_path, answers(6), eval=str(held_out))
    _, data = prepared(tmp_path, answers(3), eval="auto")
    assert data.eval is None
    assert "answer one prompt, and are not trained either; set `data.eval_share`" in data.warning
    assert "one prompt" in str(data.warning)


def test_a_function_may_return_pairs_or_labelled_answers(tmp_path: Path) -> None:
    def either(row: dict[str, Any]) -> dict[str, Any]:
        """Questions with one or two answers."""
        answer = (
            {"completion": row["a"], "label": True} if "b" not in row else {"chosen": row["a"], "rejected": row["b"]}
        )
        return {"prompt": row["q"], **answer}

    before = dict(FORMATS)
    try:
        rows = [{"q": f"{n}? ", "a": "yes", **({"b": "no"} if n % 2 else {})} for n in range(4)]
        _, data = prepared(tmp_path, rows, format=either)
    finally:  # those of functions are for the process, and other tests compare the table
        FORMATS.clear()
        FORMATS.update(before)
    assert data.train["desirable"][:] == [1, 1, 0, 1, 1, 0]


def test_rows_of_labelled_answers_are_refused_with_the_objective_for_them() -> None:
    row = {"prompt": "Why?", "completion": "So.", "label": False}
    assert holds_labelled_answers(row, {})
    assert not any(holds_labelled_answers({**row, "label": label}, {}) for label in (None, "tech", 1))
    for columns in ({}, {"instruction": "prompt"}):
        with pytest.raises(RowError, match=r"`chosen` is missing .*, or set `training.objective: kto`"):
            read(row, "pairs", columns)


def test_the_look_at_answers_marks_no_token_of_a_mismatched_one(quick: Any, tmp_path: Path) -> None:
    for field in ({"chosen": "So.", "rejected": "No."}, {"completion": "So.", "label": True}):
        file = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"Why {number}? ", **field} for number in range(12)])
        look = finetune.inspect_data(quick(f"data.train={file}", "training.objective=kto"))
        prompt, both, *_, last = look.values()["samples"]
        assert "Why" in "".join(text for text, _ in prompt[0][1])
        assert [any(trained for _, trained in pieces) for _, pieces, *_ in both] == [True, False]
        assert "0 trained" in both[1][0]
        assert "if `data.columns: {instruction: prompt}` made the rows turns" in last[0][0]


def test_sample_questions_of_labelled_answers_are_those_with_a_desirable_one(quick: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"Why {n}? ", "completion": ["no", "yes"][n % 2], "label": n % 2 == 1} for n in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    config = quick(f"data.train={tmp_path / 'rows.jsonl'}", "training.objective=kto", "data.eval=none")
    asked = [*questions(config.data, load_tokenizer(config.model, config.data))]
    assert [each.reference for each in asked] == ["yes"] * 6
