"""Facts about preparing data: what is counted, cut, dropped and held out, and where an error is said to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import write_rows
from messages import refusal

from finetune.config import DataSection, Source
from finetune.data import prepared_writer, sources
from finetune.data.counts import TOO_LONG, UNTRAINED, Affected
from finetune.data.encoded import IGNORE
from finetune.data.examples import Chat, Completion
from finetune.data.prepare import (
    _train_and_held_out,
    compared_rows,
    held_out_rows,
    prepare,
    prepare_held_out,
    questions,
)
from finetune.data.prepared_writer import Preparation
from finetune.data.problems import Problems
from finetune.errors import ConfigError, DataError

Write = Callable[..., str]


@pytest.fixture
def tokenizer(word_tokenizer: Callable[..., Any], chatml: str) -> Any:
    return word_tokenizer(chatml)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(rows: list[dict[str, Any]], name: str = "train.jsonl") -> str:
        return str(write_rows(tmp_path / name, rows))

    return write


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def message(section: DataSection, tokenizer: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepare(section, tokenizer)
    return str(caught.value)


# `<user/Hi>/<assistant/one>/`: 5 + 1 tokens of the question, 3 before the answer, the answer with its end, a newline.
def length(question: int, answer: int) -> int:
    return 3 + question + 2 + 3 + answer + 1 + 1


# -- counts ----------------------------------------------------------------------------------------------------------


def test_rows_tokens_and_trained_tokens_are_counted(write: Write, tokenizer: Any) -> None:
    source = write([chat("Hi", "one"), chat("Why?", "Because so.")])
    prepared = prepare(DataSection(train=source, eval="none"), tokenizer)
    counts = prepared.train_counts
    assert (counts.rows, counts.tokens, counts.trained_tokens) == (2, length(1, 1) + length(2, 4), 2 + 5)
    assert (counts.longest, counts.affected) == (length(2, 4), [])
    assert prepared.train["length"][:] == [length(1, 1), length(2, 4)]
    assert prepared.eval is None
    assert prepared.eval_counts is None
    row = prepared.train[0]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
    assert tokenizer.decode(row["input_ids"]) == text
    assert [tokenizer.decode([label]) for label in row["labels"] if label != IGNORE] == ["one", "<|im_end|>"]
    assert row["length"] == len(row["input_ids"]) == len(row["labels"])


def test_a_longer_row_loses_its_prompt_before_its_answer_and_is_counted(write: Write, tokenizer: Any) -> None:
    source = write([chat("Hi", "one"), chat("Hi", "one two one two"), chat("Hi", "one two one two one two")])
    section = DataSection(train=source, eval="none", max_length=length(1, 1))
    prepared = prepare(section, tokenizer)
    counts = prepared.train_counts
    assert (counts.rows, counts.dropped) == (3, 0)
    facts = counts.as_dict()
    assert (facts["truncated"], facts["answers_truncated"]) == (2, 1)
    answers = ["one<|im_end|>", "one two one two<|im_end|>", "one two one two one"]
    for row, answer in zip(prepared.train, answers, strict=True):
        assert len(row["labels"]) == section.max_length
        assert tokenizer.decode([label for label in row["labels"] if label != IGNORE]) == answer
    assert counts.affected == [
        Affected(f"{source}:2", "truncated", TOO_LONG, length(1, 7)),
        Affected(f"{source}:3", "answer truncated", TOO_LONG, length(1, 11)),
    ]


def test_a_longer_row_keeps_its_system_message_too_where_there_is_room(write: Write, tokenizer: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    source = write([{"messages": [system, *chat("so " * 20, "one")["messages"]]}])
    for limit, kept in ((30, True), (16, False)):
        [row] = prepare(DataSection(train=source, eval="none", max_length=limit), tokenizer).train
        text = tokenizer.decode(row["input_ids"])
        assert len(row["input_ids"]) == limit
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n" if kept else " so so")
        assert ("Be brief." in text) == kept
        assert text.endswith("<|im_start|>assistant\none<|im_end|>")


def test_longer_rows_may_be_left_out_and_are_listed(write: Write, tokenizer: Any) -> None:
    source = write([chat("Hi", "one"), chat("one " * 20, "two"), chat("Hi", "two"), chat("so " * 30, "two")])
    prepared = prepare(DataSection(train=source, eval="none", max_length=16, too_long="drop"), tokenizer)
    counts = prepared.train_counts
    assert (counts.rows, counts.dropped, counts.as_dict()["truncated"]) == (2, 2, 0)
    assert counts.places(what="dropped") == [f"{source}:2", f"{source}:4"]
    assert counts.dropped_why == {TOO_LONG: 2}
    assert len(prepared.train) == 2


def test_longer_rows_may_be_split_and_pieces_with_nothing_to_train_are_left_out(write: Write, tokenizer: Any) -> None:
    source = write([chat("one " * 20, "two"), {"messages": chat("Hi", "one")["messages"] * 2}])
    section = DataSection(train=source, eval="none", max_length=10, too_long="split")
    prepared = prepare(section, tokenizer)
    assert (prepared.train_counts.as_dict()["split"], prepared.train_counts.dropped) == (2, 0)
    trained = ["".join(tokenizer.decode([x]) for x in row["labels"] if x != IGNORE) for row in prepared.train]
    assert trained == ["two<|im_end|>", "one", "<|im_end|>", "one<|im_end|>"]


def test_longer_rows_may_stop_the_run_with_their_location(write: Write, tokenizer: Any) -> None:
    source = write([chat("Hi", "one"), chat("one " * 20, "two")])
    section = DataSection(train=source, eval="none", max_length=16, too_long="error")
    with refusal(DataError, f"{source}:2: the row has ", "over `data.max_length` 16"):
        prepare(section, tokenizer)


def test_an_empty_answer_is_dropped_and_listed(write: Write, tokenizer: Any) -> None:
    ends_blank = [*chat("Hi", "so")["messages"], *chat("Why?", "")["messages"]]
    for loss_on, row in (
        *(("assistant", row) for row in (
            {"text": ""}, {"text": " \n"}, chat("Hi", ""), chat("Hi", "  "), {"prompt": "Hi", "completion": " "},
            {"instruction": "Hi", "output": ""},
        )),
        ("last", {"messages": ends_blank}),
    ):  # fmt: skip
        section = DataSection(train=write([row]), eval="none", loss_on=loss_on)
        with refusal(DataError, "1 rows dropped (1 empty answer)"):
            prepare(section, tokenizer)
    for kept in (chat("Hi", "one"), {"messages": [*chat("Hi", "")["messages"], *chat("Why?", "so")["messages"]]}):
        assert prepare(DataSection(train=write([kept]), eval="none"), tokenizer).train_counts.affected == []


def test_a_row_with_every_answer_switched_off_is_dropped_and_listed(write: Write, tokenizer: Any) -> None:
    off = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one", "train": False}]}
    source = write([off, chat("Hi", "one")])
    counts = prepare(DataSection(train=source, eval="none"), tokenizer).train_counts
    assert counts.affected == [Affected(f"{source}:1", "dropped", UNTRAINED, length(1, 1))]
    masked = write([{"input_ids": [5, 6], "labels": [IGNORE, IGNORE]}, {"input_ids": [5, 6]}])
    counts = prepare(DataSection(train=masked, eval="none"), tokenizer).train_counts
    assert counts.affected == [Affected(f"{masked}:1", "dropped", UNTRAINED, 2)]


def test_duplicates_are_counted_and_dropped_where_that_is_asked(write: Write, tokenizer: Any) -> None:
    """By tokens and labels, whatever the rows look like; a row that its weight repeats is none of itself."""
    rows = [chat("Hi", "one"), chat("Hi", "two"), {**chat("Hi", "one"), "id": 3}, chat("Hi", "one")]
    source = write(rows)
    for policy, weight, left in (("keep", 1, 4), ("drop", 1, 2), ("keep", 2, 8), ("drop", 2, 4)):
        train = [Source(source=source, weight=weight)]
        counts = prepare(DataSection(train=train, eval="none", duplicates=policy), tokenizer).train_counts
        assert (counts.rows, counts.as_dict()["duplicates"]) == (left, 2 * weight)
        places = [f"{source}:{line}" for line in (3, 4) for _ in range(weight)]
        assert [row.place for row in counts.affected] == places
        assert {row.what for row in counts.affected} == {"kept" if policy == "keep" else "dropped"}


def test_rows_of_both_splits_are_listed_with_their_split(write: Write, tokenizer: Any) -> None:
    train, held_out = write([chat("Hi", "one")] * 2), write([chat("Hi", ""), chat("Hi", "one")], "eval.jsonl")
    assert list(prepare(DataSection(train=train, eval=held_out), tokenizer).affected()) == [
        {"place": f"{train}:2", "split": "train", "what": "kept", "why": "duplicate", "tokens": length(1, 1)},
        {"place": f"{held_out}:1", "split": "eval", "what": "dropped", "why": "empty answer", "tokens": None},
    ]


def test_dropping_every_row_of_a_split_is_an_error_with_count_and_cause(write: Write, tokenizer: Any) -> None:
    long, whole = [chat("one " * 20, "two")] * 3, write([chat("Hi", "one")], "whole.jsonl")
    source = write(long)
    for section, parts in (
        (
            {"train": source, "eval": "none"},
            ["3 rows dropped (3 over data.max_length)", "`data.too_long` drop", source],
        ),
        ({"train": whole, "eval": source}, ["no held-out row", "`data.eval"]),
    ):
        with refusal(DataError, *parts):
            prepare(DataSection(**section, max_length=16, too_long="drop"), tokenizer)


def test_rows_that_teach_nothing_are_refused(write: Write, tokenizer: Any) -> None:
    """The first token has no predecessor, so that of a single word nothing but its end is trained."""
    with refusal(DataError, "teaches nothing: the trained tokens of its 2 rows"):
        prepare(DataSection(train=write([{"text": "one"}] * 2), eval="none"), tokenizer)


# -- what is held out ------------------------------------------------------------------------------------------------

MANY = [{"text": f"one {'two ' * (number % 7)}so {number}", "id": number} for number in range(1500)]


def ids(rows: Any) -> list[int]:
    return [row.fields["id"] for row in rows]


def test_a_share_is_held_out_the_same_each_time_and_not_trained(write: Write, tokenizer: Any) -> None:
    source = write(MANY)
    _, default = _train_and_held_out(Preparation(DataSection(train=source), tokenizer), Problems())
    assert ids(default) == [row.fields["id"] for row in sources.rows(source) if row.share() < 0.02]
    section = DataSection(train=source, eval_share=0.1)
    held_out = ids(held_out_rows(section, tokenizer))
    first, second = prepare(section, tokenizer), prepare(section, tokenizer)
    assert [*first.train] == [*second.train]
    assert first.eval is not None
    assert [*first.eval] == [*second.eval]
    assert first.train_counts.rows + len(held_out) == len(MANY)
    # 150 expected; four standard deviations are 46.
    assert 104 <= len(held_out) == len(set(held_out)) <= 196
    assert [tokenizer.decode(row["input_ids"]).count("two") for row in first.eval] == [
        row["text"].count("two") for row in MANY if row["id"] in held_out
    ]


def test_the_share_of_a_row_depends_on_nothing_but_its_content() -> None:
    row = sources.Row("a.jsonl:1", {"text": "one", "id": {"a": 1, "b": 2}})
    assert row.share() == sources.Row("b.json[7]", {"id": {"b": 2, "a": 1}, "text": "one"}, "b.json").share()
    assert row.share() != sources.Row("a.jsonl:1", {"text": "one", "id": {"a": 1, "b": 3}}).share()
    assert row.share() != row.share("weight")


def test_compared_rows_are_called_what_they_are(write: Write, tokenizer: Any) -> None:
    source = write([chat(f"Hi {number}", "one") for number in range(20)])
    for section, said in (
        (DataSection(train=source, eval="none"), "the training rows"),
        (DataSection(train=source, eval_share=0.5), "the evaluation set"),
        (DataSection(train="python:0123456789abcdef"), "the built-in rows"),  # which are lost
    ):
        notes: list[str] = []
        compared = compared_rows(section, tokenizer, 3, 4, notes.append)
        assert compared.name == said
        assert [len(row) for row in compared.ids] == [len(row) for row in compared.labels] == [4, 4, 4]
        assert bool(notes) == (said == "the built-in rows")


def test_rows_are_held_out_as_the_evaluation_says(write: Write, tokenizer: Any) -> None:
    section = DataSection(train=write(MANY[:50]), eval="none", eval_share=0.5)
    assert prepare(section, tokenizer).train_counts.rows == 50
    assert ids(held_out_rows(section, tokenizer)) == list(range(50))
    # An evaluation file is held out whole and nothing else is; it may be of another format.
    section = DataSection(train=write(MANY[:20]), eval=write(MANY[20:25], "eval.jsonl"), eval_share=0.5)
    prepared = prepare(section, tokenizer)
    assert prepared.eval_counts is not None
    assert (prepared.train_counts.rows, prepared.eval_counts.rows) == (20, 5)
    assert ids(held_out_rows(section, tokenizer)) == [20, 21, 22, 23, 24]
    section = DataSection(train=write([{"text": "one one"}]), eval=write([chat("Hi", "two")], "eval.jsonl"))
    held_out = prepare(section, tokenizer).eval
    assert held_out is not None
    assert tokenizer.decode([label for label in held_out[0]["labels"] if label != IGNORE]) == "two<|im_end|>"


def sides(tokenizer: Any, source: str, **options: Any) -> tuple[list[str], list[str]]:
    """The texts of what is trained on and of what is held out, row by row."""
    train, held_out = _train_and_held_out(Preparation(DataSection(train=source, **options), tokenizer), Problems())
    return [row.fields["text"] for row in train], [row.fields["text"] for row in held_out or ()]


@pytest.mark.slow
def test_each_side_has_a_row_and_the_hash_alone_decides_where_it_gives_each_one(write: Write, tokenizer: Any) -> None:
    for rows in (2, 15):
        for share in (1e-9, 0.02, 0.5, 1 - 1e-9):
            texts = [f"{row}" for row in range(rows)] * 2
            source = write([{"text": text} for text in texts])
            train, held_out = sides(tokenizer, source, eval_share=share)
            assert train
            assert held_out
            assert sorted(train + held_out) == sorted(texts)
            assert not {*train} & {*held_out}  # equal rows share a fate
            by_hash = [row.fields["text"] for row in sources.rows(source) if row.share() < share]
            if 0 < len(by_hash) < len(texts):
                assert held_out == by_hash
            else:
                assert len(held_out if not by_hash else train) == 2  # one, and its equal
            other = write([{"text": text} for text in reversed(texts)], "other.jsonl")
            assert sides(tokenizer, other, eval_share=share) == (train[::-1], held_out[::-1])


@pytest.mark.parametrize(
    ("rows", "share", "held_out"),
    [(10, 0.02, 1), (49, 1e-9, 1), (50, 1e-9, 10), (60, 0.02, 10), (200, 0.02, 10), (200, 1e-9, 10)],
)
def test_ten_different_rows_are_held_out_to_judge_an_adapter_by_where_they_can_be_spared(
    rows: int, share: float, held_out: int, write: Write, tokenizer: Any
) -> None:
    texts = [{"text": " ".join(("so", "one")[int(bit)] for bit in f"{number:08b}")} for number in range(rows)]
    source = write(texts * 2)  # each of them twice: a copy says nothing more of an adapter
    below = sum(row.share() < share for row in map(sources.Row, ["x"] * rows, texts))
    assert below < 10, "the hash was meant to give fewer"
    prepared = prepare(DataSection(train=source, eval_share=share), tokenizer)
    assert prepared.eval_counts is not None
    assert prepared.eval_counts.rows == 2 * max(held_out, below)
    assert prepared.judges == (held_out >= 10)


def test_rows_that_are_all_equal_are_all_trained_with_a_warning(write: Write, tokenizer: Any) -> None:
    for share in (1e-9, 0.5, 1 - 1e-9):
        section = DataSection(train=write([{"text": "one two"}] * 3), eval_share=share)
        prepared = prepare(section, tokenizer)
        assert (prepared.train_counts.rows, prepared.eval, prepared.eval_counts) == (3, None, None)
        for part in ("no held-out row is left", "`data.eval`", "`data.eval_share`", "`data.eval: none`"):
            assert part in str(prepared.warning)
        assert len(list(held_out_rows(section, tokenizer))) == 3
        with refusal(DataError, "no held-out row is left"):
            prepare_held_out(section, tokenizer)


def test_a_broken_file_is_reported_also_if_no_row_would_be_held_out(write: Write, tokenizer: Any) -> None:
    source = write([{"text": "one"}, {"txt": "two"}])
    with open(source, "a") as file:
        file.write("{\n")
    with refusal(DataError, f"{source}:2: ", f"{source}:3:2: "):
        prepare(DataSection(train=source, eval_share=1e-9), tokenizer)
    section = DataSection(train=write([{"question": str(number)} for number in range(20)]))
    with refusal(DataError, "no format has the fields question"):
        prepare_held_out(section, tokenizer)


@pytest.mark.parametrize("taught", [1, 2, 3])
def test_neither_split_consists_of_untrained_rows_alone(taught: int, write: Write, tokenizer: Any) -> None:
    silent = {"role": "assistant", "content": "no", "train": False}
    for number, share in enumerate((1e-9, 0.1, 0.9, 1 - 1e-9)):
        empty, long = chat(f"Hi {number}", ""), chat(f"Hi {number}", "one " * 40)
        untrained = {"messages": [{"role": "user", "content": f"Hi {number}"}, silent]}
        rows = [empty, long, untrained, *(chat(f"Hi {number}", "so " * (n + 1)) for n in range(taught))]
        section = DataSection(train=write(rows), eval_share=share, max_length=24, too_long="drop")
        prepared = prepare(section, tokenizer)
        assert prepared.train_counts.rows >= 1
        assert bool(prepared.eval) == (taught > 1)
        held_out = [row.location for row in held_out_rows(section, tokenizer)]
        assert (len(held_out) == len(rows)) == (taught == 1), "all rows are trained where none is held out"


# -- errors have a place ---------------------------------------------------------------------------------------------


def test_a_wrong_row_is_reported_with_its_file_line_and_field(write: Write, tokenizer: Any) -> None:
    source = write([{"text": "one"}, chat("Hi", "one")])
    with refusal(DataError, f"{source}:2: `text` is missing in rows of the format `text`", "`data.format`"):
        prepare(DataSection(train=source, eval="none"), tokenizer)
    # A named format is held against every row.
    source = write([{"text": "one two", "instruction": "x", "output": "y"}, {"text": "one two"}])
    assert prepare(DataSection(train=source, eval="none", format="text"), tokenizer).train_counts.rows == 2
    with refusal(DataError, f"{source}:2: `instruction` is missing in rows of the format `alpaca`; "):
        prepare(DataSection(train=source, eval="none", format="alpaca"), tokenizer)
    held_out = write([{"text": 5}], "eval.jsonl")
    with refusal(DataError, f"{held_out}:1: `text`"):
        prepare(DataSection(train=write([{"text": "one"}]), eval=held_out), tokenizer)
    # One that its weight repeats is reported once.
    source = write([{"text": "one"}, {"text": 5}])
    section = DataSection(train=[Source(source=source, weight=3)], eval="none")
    assert message(section, tokenizer) == f"{source}:2: `text` must be text, not a number"


def test_all_wrong_rows_and_lines_are_reported_in_order(write: Write, tokenizer: Any) -> None:
    source = write([chat("Hi", "one"), {"messages": 5}, chat("Hi", "one"), {"messages": []}])
    with open(source, "a") as file:
        file.write('{"messages": [\n' + json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    problems = message(DataSection(train=source, eval="none"), tokenizer).splitlines()
    assert [line.removeprefix(source).split(": ")[0] for line in problems] == [":2, 4", ":5:15", ":6"]


def test_problems_are_reported_in_row_order_whichever_thread_finds_them(
    write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds those of a line as it reads ahead, the format those of a field, the template those of turns."""
    source, good = write([]), json.dumps(chat("Hi", "one"))
    turns = {"messages": [{"role": "user", "content": "Hi"}]}
    lines = [good, '{"messages": [', json.dumps({"messages": 5}), json.dumps(turns)]
    for batch in (1, 7, 256):
        monkeypatch.setattr(prepared_writer, "_BATCH_ROWS", batch)
        for count in (4, 9):
            Path(source).write_text("\n".join(lines * count) + "\n")
            problems = message(DataSection(train=source, eval="none"), tokenizer).splitlines()
            places = [line.removeprefix(f"{source}:").split(": ")[0] for line in problems if source in line]
            found = [int(line.split(":")[0]) for place in places for line in place.split(", ")]
            wrong = [number for number in range(2, 4 * count + 1) if number % 4 != 1]
            assert sorted(found) == wrong[:20]
            assert ("stopped after 20 problems" in problems[-1]) == (count == 9)


# -- several sources -------------------------------------------------------------------------------------------------


def test_a_share_of_several_sources_is_held_out_by_hash_with_no_row_on_both_sides(write: Write, tokenizer: Any) -> None:
    several = [write(MANY[:700], "a.jsonl"), Source(source=write(MANY[700:], "b.jsonl"), weight=2)]
    held_out = ids(held_out_rows(DataSection(train=several, eval_share=0.1), tokenizer))
    assert set(held_out) == set(ids(held_out_rows(DataSection(train=write(MANY), eval_share=0.1), tokenizer)))
    assert all(held_out.count(number) == (1 if number < 700 else 2) for number in set(held_out))


def test_a_file_in_both_splits_is_refused_also_where_a_folder_hides_it(
    write: Write, tokenizer: Any, tmp_path: Path
) -> None:
    held_out = write([{"text": "one"}], "held.jsonl")
    write([{"text": "two"}], "rows.jsonl")
    said = message(DataSection(train=str(tmp_path), eval=held_out), tokenizer)
    assert said.startswith(f"{held_out}: is read by both `data.train` and `data.eval`")


def test_the_format_is_detected_for_each_source(write: Write, tokenizer: Any) -> None:
    several = [write([{"text": "one"}] * 2, "a.jsonl"), write([chat("Hi", "two")], "b.jsonl")]
    held_out = [write([{"text": "one two"}], "eval.jsonl"), "builtin:python_docs"]
    prepared = prepare(DataSection(train=several, eval="none"), tokenizer)
    trained = [tokenizer.decode([label for label in row["labels"] if label != IGNORE]) for row in prepared.train]
    assert trained == ["one<|im_end|>", "one<|im_end|>", "two<|im_end|>"]
    # Held-out sources too, with the built-in one's own held-out rows
    places = [row.location for row in held_out_rows(DataSection(train=several, eval=held_out), tokenizer)]
    assert places[:2] == [f"{held_out[0]}:1", "builtin:python_docs[eval]:1"]


def test_sources_without_rows_are_named(write: Write, tokenizer: Any) -> None:
    several = [write([], "a.jsonl"), Source(source=write([], "b.jsonl"), weight=2)]
    said = message(DataSection(train=several, eval="none"), tokenizer)
    assert f"({several[0]}, {several[1].source} (weight 2)) has no rows" in said


# -- columns and tokens ----------------------------------------------------------------------------------------------


def test_columns_are_mapped_before_the_format_is_detected(write: Write, tokenizer: Any) -> None:
    source = write([{"question": "Why?", "answer": "so"}])
    section = DataSection(train=source, eval="none", columns={"instruction": "question", "output": "answer"})
    [row] = prepare(section, tokenizer).train
    assert tokenizer.decode([label for label in row["labels"] if label != IGNORE]) == "so<|im_end|>"
    [(_, prompt, reference)] = questions(section, tokenizer)
    assert (prompt, reference) == (Chat([{"role": "user", "content": "Why?"}]), "so")
    source = write([{"question": "x", "text": "one"}, {"text": "one"}])
    with refusal(DataError, f"{source}:2: `data.columns` takes `text` from"):
        prepare(DataSection(train=source, eval="none", columns={"text": "question"}), tokenizer)
    for form, known in (("auto", "messages"), ("alpaca", "instruction")):
        section = DataSection(train=write([{"text": "one"}]), eval="none", format=form, columns={"qestion": "text"})
        with refusal(ConfigError, "`data.columns`", "`qestion`", known):
            prepare(section, tokenizer)


def test_tokenized_rows_are_trained_as_they_are_or_refused(write: Write, tokenizer: Any) -> None:
    source = write([{"input_ids": [5, 6, 7], "labels": [IGNORE, 6, 7]}, {"input_ids": [5, 6]}])
    prepared = prepare(DataSection(train=source, eval="none"), tokenizer)
    assert prepared.train["labels"][:] == [[IGNORE, 6, 7], [5, 6]]
    for row, words in (
        ({"input_ids": [5, 99_999]}, "`input_ids[1]` is 99999, but the tokenizer has"),
        ({"input_ids": [-1]}, "`input_ids[0]` is -1"),
        ({"input_ids": [5, 6, 7], "labels": [6, 7, IGNORE]}, "`labels[0]` is 6, but `input_ids[0]` is 5"),
    ):
        source = write([row])
        with refusal(DataError, f"{source}:1: {words}"):
            prepare(DataSection(train=source, eval="none"), tokenizer)


# -- questions -------------------------------------------------------------------------------------------------------


def test_questions_are_held_out_conversations_without_their_last_answer(write: Write, tokenizer: Any) -> None:
    rows = [
        {"messages": [{"role": "assistant", "content": "one"}]},
        {"messages": [{"role": "user", "content": "Hi"}]},
        *(chat(f"Why {number}?", f"so {number}") for number in range(2)),
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no", "train": False}]},
        {**chat("Why?", "so"), "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ]
    section = DataSection(train=write([chat("Hi", "one")]), eval=write(rows, "eval.jsonl"))
    found = [
        (row.location[-1], prompt.messages[-1]["content"], answer)
        for row, prompt, answer in questions(section, tokenizer)
    ]
    assert found == [("3", "Why 0?", "so 0"), ("4", "Why 1?", "so 1")]
    assert list(questions(DataSection(train=write([{"text": "one"}]), eval="none"), tokenizer)) == []
    completions = write([{"prompt": "Why?", "completion": " so"}, {"prompt": "", "completion": "so"}])
    [(_, prompt, reference)] = questions(DataSection(train=completions, eval="none"), tokenizer)
    assert (prompt, reference) == (Completion("Why?", ""), " so")


def test_columns_that_go_nowhere_are_known_once_for_the_split(write: Write, tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "so", "mood": "hm", "id": 5}
    row = {"messages": [{"role": "user", "content": "Hi"}, answer], "source": "web", "lang": ""}
    found = prepare(DataSection(train=write([row, {**row, "lang": "en"}]), eval="none"), tokenizer)
    assert found.train_counts.traits.unused == ["source", "messages.id", "messages.mood", "lang"]
    tokenizer.chat_template = tokenizer.chat_template + "{# mood #}"
    found = prepare(DataSection(train=write([row]), eval="none"), tokenizer)
    assert found.train_counts.traits.unused == ["source", "messages.id"]
