"""Facts about formats: what each reads, how one is recognised, and that a wrong field is named."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.formats import FORMATS, ROLES, Chat, Completion, Example, RowError, Text, detect

ASK = {"role": "user", "content": "Why?"}
TELL = {"role": "assistant", "content": "Because."}

ROWS: list[tuple[str, dict[str, Any], Example]] = [
    ("messages", {"messages": [ASK, TELL], "id": 3}, Chat([ASK, TELL])),
    ("prompt_completion", {"prompt": "Why?", "completion": " Because."}, Completion("Why?", " Because.")),
    ("prompt_completion", {"prompt": [ASK], "completion": [TELL]}, Chat([ASK, TELL], trained_from=1)),
    (
        "alpaca",
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        Chat([{"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"}]),
    ),
    (
        "alpaca",
        {"instruction": "Sing.", "input": "", "output": "La."},
        Chat([{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "La."}]),
    ),
    (
        "alpaca",
        {"instruction": "Sing.", "output": "La."},
        Chat([{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "La."}]),
    ),
    (
        "alpaca",
        {"instruction": "Sing.", "input": None, "output": "La."},
        Chat([{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "La."}]),
    ),
    ("text", {"text": "Once."}, Text("Once.")),
]


@pytest.mark.parametrize(("name", "row", "example"), ROWS)
def test_a_row_is_read_in_its_format_and_by_detection(name: str, row: dict[str, Any], example: Example) -> None:
    assert FORMATS[name].read(row) == example
    assert detect(row) == name
    assert FORMATS["auto"].read(row) == example


def test_every_format_is_tried_above() -> None:
    assert {name for name, _, _ in ROWS} | {"auto"} == set(FORMATS)


def test_a_row_of_two_formats_is_of_the_first_in_the_table() -> None:
    assert detect({"text": "x", "messages": []}) == "messages"
    assert detect({"text": "x", "prompt": "p", "completion": "c"}) == "prompt_completion"


@pytest.mark.parametrize("row", [{}, {"question": "x", "answer": "y"}, {"prompt": "x"}, {"instruction": "x"}])
def test_a_row_of_no_format_is_told_its_fields_and_all_formats(row: dict[str, Any]) -> None:
    with pytest.raises(RowError) as caught:
        detect(row)
    message = str(caught.value)
    assert all(field in message for field in row)
    assert all(f"{name}: {form.help}" in message for name, form in FORMATS.items() if name != "auto")


@pytest.mark.parametrize("role", ROLES)
def test_the_four_roles_are_known(role: str) -> None:
    message = {"role": role, "content": ""}
    assert FORMATS["messages"].read({"messages": [message]}) == Chat([message])


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("messages", {}, ["`messages`", "list"]),
        ("messages", {"messages": None}, ["`messages`", "list"]),
        ("messages", {"messages": []}, ["`messages`", "at least one"]),
        ("messages", {"messages": "Hi"}, ["`messages`", "list"]),
        ("messages", {"messages": [ASK, "Hi"]}, ["`messages[1]`", "not text"]),
        ("messages", {"messages": [ASK, {"content": "x"}]}, ["`messages[1].role`", "None"]),
        ("messages", {"messages": [{"role": "human", "content": "x"}]}, ["`messages[0].role`", "'human'", "user"]),
        ("messages", {"messages": [{"role": ["user"], "content": "x"}]}, ["`messages[0].role`"]),
        ("messages", {"messages": [ASK, TELL, {"role": "user"}]}, ["`messages[2].content`", "not null"]),
        ("messages", {"messages": [{"role": "user", "content": 5}]}, ["`messages[0].content`", "not a number"]),
        ("messages", {"messages": [{"role": "user", "content": [1]}]}, ["`messages[0].content`", "not a list"]),
        ("prompt_completion", {"prompt": "x"}, ["`completion` is missing"]),
        ("prompt_completion", {"prompt": True, "completion": "x"}, ["`prompt`", "not a boolean"]),
        ("prompt_completion", {"prompt": [ASK], "completion": "x"}, ["`prompt`", "not a list"]),
        ("prompt_completion", {"prompt": [ASK], "completion": [{}]}, ["`completion[0].role`"]),
        ("alpaca", {"output": "x"}, ["`instruction` is missing"]),
        ("alpaca", {"instruction": "x"}, ["`output` is missing"]),
        ("alpaca", {"instruction": "x", "input": 5, "output": "y"}, ["`input`", "not a number"]),
        ("alpaca", {"instruction": "x", "output": {"a": 1}}, ["`output`", "not an object"]),
        ("text", {"text": 1.5}, ["`text`", "not a number"]),
        ("text", {}, ["`text` is missing"]),
    ],
)
def test_a_wrong_field_is_named_with_what_it_is(name: str, row: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RowError) as caught:
        FORMATS[name].read(row)
    assert [word for word in words if word not in str(caught.value)] == []


def test_half_of_a_surrogate_pair_is_told_by_field_and_place() -> None:
    with pytest.raises(RowError, match=r"`text` has half of a surrogate pair at character 2"):
        FORMATS["text"].read({"text": "a\ud800"})


def test_assistant_turns_of_a_prompt_are_context() -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    example = FORMATS["prompt_completion"].read(
        {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}
    )
    assert example.trained_from == 3
