"""Facts about `finetune generate` and `finetune chat`: where prompts come from, and what people and programs get."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from jobs import write_rows
from messages import refusal, reported
from pyarrow import parquet
from transformers import BloomConfig, LlamaConfig

import finetune
from finetune.data import formats, sources
from finetune.errors import ConfigError, DataError
from finetune.evaluation import chat_session, commands, run_models
from finetune.generation import answering
from finetune.generation.settings import Settings
from finetune.storage.rundir import RunDirectory

SETTINGS = Settings(max_new_tokens=6)
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def opened(trained: RunDirectory) -> run_models.Ready:
    return run_models.ready(trained)


@pytest.fixture
def call(call: Call, opened: run_models.Ready, trained: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run `finetune COMMAND RUN ARGUMENTS` with `typed` as standard input, on a model that was loaded before."""
    monkeypatch.setattr(commands, "ready", lambda *_, **__: opened)

    def run(command: str, *arguments: object, typed: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        return call(command, trained.path, "--max-new-tokens", 6, *arguments)

    return run


def text_of(opened: run_models.Ready, prompt: str) -> str:
    return next(opened.answers([opened.asked(prompt)], SETTINGS)).text


def test_a_file_of_prompts_becomes_lines_with_their_answers(
    call: Call, opened: run_models.Ready, tmp_path: Path
) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 3"}]
    rows = [{"id": 7, "prompt": "What is `abc`?"}, {"messages": turns}, {"prompt": "Say 5"}, {"prompt": turns[1:]}]
    file = write_rows(tmp_path / "prompts.jsonl", rows)
    code, out, err = call("generate", "--file", file)
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [{key: row[key] for key in given} for row, given in zip(found, rows, strict=True)] == rows
    assert [found[0]["answer"], found[2]["answer"]] == [text_of(opened, "What is `abc`?"), text_of(opened, "Say 5")]
    assert found[3]["answer"] == text_of(opened, "Say 3")
    assert {(row["model"], row["tokens"] <= 6) for row in found} == {("adapter", True)}
    assert "KV cache (dynamic): at most" in err


def test_a_field_that_json_has_no_type_for_is_kept_as_text(call: Call, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"prompt": ["Say 5"], "day": [date(2026, 1, 2)]}), tmp_path / "prompts.parquet")
    code, out, _ = call("generate", "--file", tmp_path / "prompts.parquet")
    assert (code, json.loads(out)["day"]) == (0, "2026-01-02")


def test_standard_input_is_lines_of_text_or_of_json(call: Call, opened: run_models.Ready) -> None:
    for typed in (b"Say 5\n\nWhat is `abc`?\n", b'{"prompt": "Say 5"}\n{"prompt": "What is `abc`?"}\n'):
        code, out, _ = call("generate", typed=typed)
        assert code == 0
        found = [json.loads(line) for line in out.splitlines()]
        assert [row["prompt"] for row in found] == ["Say 5", "What is `abc`?"]
        assert [row["answer"] for row in found] == [text_of(opened, row["prompt"]) for row in found]


def test_one_prompt_is_answered_as_text_and_several_as_json(call: Call, opened: run_models.Ready) -> None:
    expected = text_of(opened, "Say 5")
    assert call("generate", "--prompt", "Say 5")[1] == expected + "\n"
    one = json.loads(call("generate", "--prompt", "Say 5", "--json")[1])
    two = [json.loads(line) for line in call("generate", "--prompt", "Say 5", "--prompt", "Say 6")[1].splitlines()]
    assert one == two[0]
    assert (one["prompt"], one["answer"]) == ("Say 5", expected)


def test_options_reach_the_generation(call: Call, opened: run_models.Ready) -> None:
    whole = text_of(opened, "What is `abc`?")
    stop = whole.split()[-1]
    code, out, _ = call("generate", "--prompt", "What is `abc`?", "--stop", stop)
    assert (code, out.strip()) == (0, whole[: whole.index(stop)].strip())
    hot = ["--temperature", 3, "--top-k", 50, "--top-p", 0.99, "--min-p", 0.001, "--repetition-penalty", 1.1]
    answers = {call("generate", "--prompt", "Say 5", *hot, "--seed", seed)[1] for seed in (1, 2, 3)}
    assert len(answers) > 1


@pytest.mark.parametrize(
    ("arguments", "typed", "code", "told"),
    [
        (("--prompt", "x", "--file", "rows.jsonl"), b"", 2, "give one of them"),
        ((), b"", 3, "standard input: no prompts"),
        ((), b'{"prompt": 5}\n{"text": "x"}\n{"messages": []}\n', 3, "standard input:3: `messages` must be a list"),
        ((), b"a \xff b\n", 3, "standard input:1: byte 3 of the line is not UTF-8"),
        (("--prompt", "x", "--cache", "dynamik"), b"", 2, "did you mean `dynamic`"),
        (("--prompt", "x", "--cache", "sliding"), b"", 2, "no layer of this model attends to a window"),
        (("--prompt", "x", "--top-p", 0), b"", 2, "`top_p` must be above 0"),
        (("--prompt", "x", "--model", "bse"), b"", 2, "choose base, adapter, merged or served"),
        (("--file", "nowhere.txt"), b"", 3, "nowhere.txt: no such file"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(
    call: Call, arguments: tuple[Any, ...], typed: bytes, code: int, told: str
) -> None:
    found, out, err = call("generate", *arguments, typed=typed)
    assert (found, out) == (code, "")
    reported(err, told)


def test_prompts_are_read_before_a_model_is_loaded(
    trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(commands, "ready")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    (tmp_path / "none.txt").touch()
    with refusal(DataError, "no prompts"):
        commands.generate(trained, [], tmp_path / "none.txt", "adapter", SETTINGS, as_json=False)
    with refusal(ConfigError, "--prompt", "--file"):
        commands.generate(trained, [], None, "adapter", SETTINGS, as_json=False)


@pytest.mark.slow
def test_exceeding_the_positions_of_a_rotary_base_is_noted_once_and_before_a_long_prompt(
    call: Call, opened: run_models.Ready, tmp_path: Path
) -> None:
    long = "What is this? " * 200
    whole = len(opened._ids(opened.asked(long)))
    assert whole > 1024 == opened.model.config.max_position_embeddings
    (tmp_path / "prompts.txt").write_text(f"Say 5\n{long}\n{long}\n")
    _, out, err = call("generate", "--file", tmp_path / "prompts.txt")
    assert len(out.splitlines()) == 3
    said = " ".join(err.split())
    assert said.count("beyond the 1,024 positions that the base was made for") == 1
    assert f"a prompt has {whole:,} tokens" in said


def test_only_an_answer_beyond_the_positions_is_noted() -> None:
    told: list[str] = []
    positions = answering.Positions(SimpleNamespace(config=LlamaConfig(max_position_embeddings=10)), told.append)
    positions.prompt(10)
    positions.answer(4, 6)
    assert told == []
    positions.answer(4, 7)
    positions.answer(4, 9)
    assert [note.partition(",")[0] for note in told] == ["an answer reaches token 11"]
    unbounded = answering.Positions(SimpleNamespace(config=BloomConfig()), told.append)
    unbounded.prompt(10**6)
    assert len(told) == 1


def test_a_conversation_that_ends_with_an_answer_is_refused_as_a_prompt(
    opened: run_models.Ready, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    with refusal(DataError, "rows.jsonl:1", "`messages`"):
        commands.prompts_from_file(file, opened.asked)


def test_an_answer_cannot_steer_the_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_models.Ready, "stream", lambda self, prompt, settings, say: say("one\n\ttwo \x1b[2J\u202e"))
    for command, arguments, typed in (("generate", ["--prompt", "x"], b""), ("chat", [], b"x\n")):
        assert call(command, *arguments, typed=typed)[:2] == (0, "one\n\ttwo \ufffd[2J\ufffd\n")


def test_a_chat_compares_base_and_adapter(call: Call, opened: run_models.Ready) -> None:
    typed = "Say 5\n/base\n/reset\nSay 5\n/adapter\n/reset\nSay 5\n/nothing\n/quit\nSay 5"
    code, out, err = call("chat", typed=typed.encode())
    assert code == 0
    first, base, again = out.splitlines()
    assert first == again == text_of(opened, "Say 5")
    assert base not in (first, "")
    for told in ("the base alone", "the base with the adapter", "begins anew", "no command /nothing"):
        assert told in " ".join(err.split())


def test_a_chat_keeps_earlier_turns_until_reset(opened: run_models.Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    stream = run_models.Ready.stream

    def watched(self: run_models.Ready, prompt: Any, *rest: Any) -> Any:
        asked.append(prompt.messages)
        return stream(self, prompt, *rest)

    monkeypatch.setattr(run_models.Ready, "stream", watched)
    conversation = chat_session.Conversation(opened, SETTINGS, lambda piece: None, lambda line: None)
    for line in ("Say 5", "Say 6", "/reset", "Say 7"):
        conversation.take(line)
    turns = [{"role": "user", "content": f"Say {number}"} for number in (5, 6, 7)]
    answer = {"role": "assistant", "content": text_of(opened, "Say 5")}
    assert asked == [turns[:1], [turns[0], answer, turns[1]], turns[2:]]


def conversing(
    opened: run_models.Ready, settings: Settings = SETTINGS
) -> tuple[chat_session.Conversation, list[str], list[str]]:
    """A conversation, the pieces that it says, and its notes."""
    said: list[str] = []
    noted: list[str] = []
    return chat_session.Conversation(opened, settings, said.append, noted.append), said, noted


def test_both_answer_a_line_and_the_conversation_goes_on_from_the_adapter(opened: run_models.Ready) -> None:
    conversation, said, _ = conversing(opened)
    conversation.take("/both")
    conversation.take("Say 5")
    base, adapter = "".join(said).splitlines()
    assert adapter == f"[adapter] {text_of(opened, 'Say 5')}"
    assert base.startswith("[base] ")
    assert base.removeprefix("[base]") != adapter.removeprefix("[adapter]")
    assert [message["content"] for message in conversation._so_far.messages] == ["Say 5", text_of(opened, "Say 5")]


def test_retry_replaces_the_last_answer_at_the_current_temperature(opened: run_models.Ready) -> None:
    conversation, said, noted = conversing(opened)
    conversation.take("/retry")
    conversation.take("Say 5")
    conversation.take("/retry")
    assert noted == ["there is nothing to answer again", noted[1]]
    assert "the same answer" in noted[1]
    conversation.take("/temperature 5")
    for _ in range(3):
        conversation.take("/retry")
    assert len(set("".join(said).splitlines())) > 2
    assert [message["role"] for message in conversation._so_far.messages] == ["user", "assistant"]
    for word, answer in (("x", "x is no number"), ("-1", "`temperature` must be 0"), ("", "the temperature is 5")):
        conversation.take(f"/temperature {word}")
        assert noted[-1].startswith(answer)


def test_a_retry_of_a_line_that_was_too_long_keeps_the_turns_before(
    opened: run_models.Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, _, noted = conversing(opened)
    conversation.take("Say 5")
    before = list(conversation._so_far.messages)

    def too_long(*_: object) -> None:
        raise answering.PromptTooLong("the prompt is too long")

    monkeypatch.setattr(run_models.Ready, "stream", too_long)
    conversation.take("Say 6")
    conversation.take("/retry")
    assert noted.count("the prompt is too long, or /reset") == 2
    assert conversation._so_far.messages == before


def test_a_conversation_is_saved_as_a_row_that_can_be_trained_on(opened: run_models.Ready, tmp_path: Path) -> None:
    conversation, _, noted = conversing(replace(opened, system="Be brief."))
    conversation.take("/save")
    conversation.take("Say 5")
    conversation.take("/save")
    for _ in range(2):
        conversation.take(f"/save {tmp_path / 'rows.jsonl'}")
    conversation.take(f"/save {tmp_path / 'missing' / 'rows.jsonl'}")
    assert noted[:2] == ["there is no conversation to save", "name a file: /save rows.jsonl"]
    assert "could not be written" in noted[-1]
    (row, again) = sources.rows(str(tmp_path / "rows.jsonl"))
    assert row.fields == again.fields
    example, _ = formats.read(row.fields, "auto", {})
    assert [(one["role"], bool(one["content"])) for one in example.messages] == [
        ("system", True), ("user", True), ("assistant", True)
    ]  # fmt: skip


def test_the_help_lists_every_command(opened: run_models.Ready) -> None:
    conversation, _, noted = conversing(opened)
    conversation.take("/help")
    assert [line.split()[0] for line in noted[0].splitlines()] == list(chat_session.COMMANDS)


# -- the system message ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_system_message_that_all_rows_share_is_recorded_and_asked_with(
    quick, trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*systems: str) -> str:
        turns = [
            [{"role": "system", "content": each} for each in systems[number % 2 : number % 2 + 1]]
            + [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": str(number)}]
            for number in range(12)
        ]
        file = write_rows(tmp_path / f"{len(systems)}.jsonl", [{"messages": each} for each in turns])
        return f"data.train={file}"

    few = ["training.max_steps=1", "data.eval=none", "training.eval_every=null"]
    shared, several = (
        finetune.train(quick(*few, rows(*systems), run=f"run{len(systems)}")).run
        for systems in (("Be brief.", "Be brief."), ("Be brief.", "Be long.", ""))
    )
    assert [run_models.system_of(run, None) for run in (shared, several, trained)] == ["Be brief.", "", ""]
    assert [run_models.system_of(shared, given) for given in ("Rhyme.", "")] == ["Rhyme.", ""]
    asked: list[Any] = []

    def answers(self: run_models.Ready, prompts: Any, *_: Any) -> Any:
        asked.extend(each.messages for each in prompts)
        return iter([answering.Answer("", 1, True)] * len(prompts))

    monkeypatch.setattr(run_models.Ready, "answers", answers)
    finetune.generate(shared, "Hi")
    finetune.generate(shared, "Hi", system="")
    for system in (None, "Rhyme."):
        commands.generate(shared, ["Hi"], None, "adapter", SETTINGS, as_json=True, system=system)
    assert [[message["content"] for message in messages] for messages in asked] == [
        ["Be brief.", "Hi"], ["Hi"], ["Be brief.", "Hi"], ["Rhyme.", "Hi"]
    ]  # fmt: skip
    assert capsys.readouterr().err.count("system message of the rows: Be brief. (--system gives another") == 1


def test_a_run_of_plain_text_has_no_system_message(run: RunDirectory) -> None:
    run.event("resumed", learns="text")
    assert run_models.system_of(run, None) == ""
    with refusal(ConfigError, "trained on plain text, which has no system message"):
        run_models.system_of(run, "Be brief.")


def test_an_interrupt_stops_the_answer_and_not_the_chat(opened: run_models.Ready) -> None:
    said: list[str] = []

    def say(piece: str) -> None:
        said.append(piece)
        if len(said) == 1:
            raise KeyboardInterrupt

    conversation = chat_session.Conversation(opened, SETTINGS, say, said.append)
    assert conversation.take("What is `abc`?")
    assert said[1:] == [" [stopped]", "\n"]
    assert conversation._so_far.messages[-1] == {"role": "assistant", "content": said[0]}
    assert conversation.take("Say 5")
    assert said[-1] == "\n"
    assert len("".join(said[3:])) > 1


def test_at_a_terminal_an_interrupt_drops_the_line_and_the_end_leaves(
    opened: run_models.Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter([KeyboardInterrupt, "/reset", EOFError])

    def line(prompt: str) -> str:
        found = next(typed)
        if isinstance(found, str):
            return found
        raise found

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    said: list[str] = []
    noted: list[str] = []
    chat_session.converse(opened, SETTINGS, said.append, noted.append)
    assert said == ["\n", "\n"]
    assert "/base" in noted[0]
    assert noted[1:] == ["the conversation begins anew"]
    with refusal(ConfigError, "finetune chat` is for a conversation"):
        commands.prompts_from_standard_input(opened.asked)


def test_a_run_of_plain_text_is_continued_line_by_line(opened: run_models.Ready) -> None:
    plain = run_models.Ready(opened.config, opened.model, opened.tokenizer, "completion")
    said: list[str] = []
    conversation = chat_session.Conversation(plain, SETTINGS, said.append, said.append)
    conversation.greet()
    assert "each line is continued by itself" in said[1]
    for _ in range(2):
        del said[:]
        conversation.take("def f(x):")
        assert "".join(said) == text_of(plain, "def f(x):") + "\n"
