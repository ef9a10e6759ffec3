"""Facts about prompts: they have the shape of the rows that were learnt, and people see all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from jobs import write_rows
from messages import reported

import finetune
from finetune.data.examples import Chat, Completion, Message, shown
from finetune.data.prepare import prepare
from finetune.generation import answering
from finetune.model.source.tokenizer import load_tokenizer
from finetune.training import sample_answers

Rows = list[dict[str, Any]]

SYSTEM: Message = {"role": "system", "content": "Be brief."}


def conversation(number: int) -> list[Message]:
    turns = [("user", f"Say {number}"), ("assistant", "what?"), ("user", "that"), ("assistant", f"{number}, said")]
    return [SYSTEM, *({"role": role, "content": content} for role, content in turns)]


KINDS: dict[str, tuple[Callable[[int], dict[str, Any]], str, str]] = {
    "chat": (
        lambda number: {"messages": [{"role": "user", "content": f"Say {number}"}, conversation(number)[-1]]},
        "Say 5",
        "<|im_start|>user\nSay 5<|im_end|>\n<|im_start|>assistant\n",
    ),
    "completion": (lambda number: {"prompt": f"Say {number}:", "completion": f" {number}, said"}, "Say 5:", "Say 5:"),
    "text": (lambda number: {"text": f"Say {number}: {number}, said"}, "Say 5:", "Say 5:"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each prompt that a model was asked, in place of its answers."""
    found: list[list[int]] = []

    def said(model: Any, tokenizer: Any, prompts: list[list[int]], *_: Any, **__: Any) -> Iterator[answering.Answer]:
        found.extend(prompts)
        return iter([answering.Answer("said", 1, ended=True)] * len(prompts))

    monkeypatch.setattr(answering, "answers", said)
    monkeypatch.setattr(sample_answers, "QUESTIONS", 3)  # which take no time here
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_asked_as_its_rows_are_written_though_they_are_gone(
    kind: str, quick: Any, asked: list[list[int]], tmp_path: Path
) -> None:
    row, prompt, written = KINDS[kind]
    rows = write_rows(tmp_path / "rows.jsonl", [row(number) for number in range(30)])
    config = quick(f"data.train={rows}", "training.max_steps=1", "output.merge=false")
    tokenizer = load_tokenizer(config.model)
    learnt = [list(ids) for ids in prepare(config.data, tokenizer).train["input_ids"]]
    run = finetune.train(config).run
    answered = json.loads(run.answers_file.read_text())
    assert bool(answered) == (kind != "text"), "which has no question"
    for sample in answered:
        assert sample["reference"].strip().partition(",")[0] in sample["question"]
        assert (sample["before"], sample["after"]) == ("said", "said")
    asked.clear()
    rows.unlink()
    for which in ("base", "adapter"):
        assert finetune.generate(run, prompt, which=which) == "said"
    assert [tokenizer.decode(ids) for ids in asked] == [written] * 2
    assert any(ids[: len(asked[0])] == asked[0] for ids in learnt)
    # A control token that a person spells is text, as in a row.
    finetune.generate(run, prompt + "<|im_end|>")
    assert asked[-1].count(tokenizer.eos_token_id) == written.count("<|im_end|>")


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_the_sample_answers_show_every_turn_that_was_asked_whatever_else_the_messages_hold(
    ending: str, quick: Any, asked: list[list[int]], tmp_path: Path
) -> None:
    """Half of a surrogate pair is no JSON that is read again, and NaN none at all; no template writes either."""
    rows = tmp_path / f"rows{ending}"
    more = {".jsonl": {"name": "\ud800"}, ".parquet": {"score": math.nan}}[ending]
    made = [{"messages": [{**turn, **more} for turn in conversation(number)]} for number in range(30)]
    if ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), rows)
    else:
        write_rows(rows, made)
    run = finetune.train(quick(f"data.train={rows}", "training.max_steps=1")).run
    assert run.finished
    answered = json.loads(run.answers_file.read_text())
    assert [row["after"] for row in answered] == ["said"] * 3
    tokenizer = load_tokenizer(run.config().model)
    numbers = [int(row["reference"].partition(",")[0]) for row in answered]
    assert {tokenizer.decode(ids) for ids in asked} == {
        tokenizer.apply_chat_template(conversation(number)[:-1], add_generation_prompt=True, tokenize=False)
        for number in numbers
    }
    for number, row in zip(numbers, answered, strict=True):
        assert row["question"] == f"system: Be brief.\nuser: Say {number}\nassistant: what?\nuser: that"
        assert row["question"] in run.report_file.read_text()


def test_a_prompt_is_shown_with_who_says_what_but_a_single_question_by_itself() -> None:
    question: Message = {"role": "user", "content": "Why?"}
    call: Message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert shown(Completion("Once", "")) == "Once"
    assert shown(Chat([question])) == "Why?"
    assert shown(Chat([SYSTEM, question])) == "system: Be brief.\nuser: Why?"
    assert shown(Chat([question, call])) == 'user: Why?\nassistant: {"name": "f", "arguments": {}}'


def test_a_run_that_does_not_say_what_its_rows_were_is_asked_as_a_conversation_with_a_word(
    run: finetune.RunDirectory, asked: list[list[int]], capsys: pytest.CaptureFixture
) -> None:
    lines = [{key: value for key, value in event.items() if key != "learns"} for event in run.events()]
    write_rows(run.events_file, lines)
    finetune.generate(run, "Say 5", max_new_tokens=1)
    assert len(asked) == 1
    reported(capsys.readouterr().err, "does not record")
