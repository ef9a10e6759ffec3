"""What becomes of rows under the templates that models are published with: trained rightly, or refused with the reason.

Each word of a row stands in it once, so that the trained text says by itself whose words are in it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
from jobs import sampled

from finetune.config import DataSection, ModelSection
from finetune.data import chat
from finetune.data.examples import Chat, RowError
from finetune.data.formats import FORMATS
from finetune.model.source.tokenizer import load_tokenizer

PUBLISHED = Path(trl.__file__).parent / "chat_templates"
CONTROL = re.compile(r"<\|[A-Za-z_]+\|?>|<[a-z_]+\|>|<｜[^<>]+｜>|<(?:start|end)_of_[a-z]+>|\[/?INST\]|</s>|<sop>")


@functools.lru_cache(maxsize=4)
def tokenizer_of(name: str) -> Any:
    """The built-in tokenizer with a published template and the control tokens in its source."""
    file = PUBLISHED / f"{name}.jinja"
    tokenizer = load_tokenizer(ModelSection(), DataSection(chat_template=str(file)))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(CONTROL.findall(file.read_text("utf-8"))))})
    if "deepseek" in name:
        tokenizer.eos_token = "<｜end▁of▁sentence｜>"
    return tokenizer


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(place: str, days: int, name: str = "abcdefghi") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "lookup", "arguments": {"place": place, "days": days}}}


def result(content: str, name: str = "abcdefghi") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "name": "lookup", "content": content}


PLACE = {"type": "string", "description": "settlement"}
DAYS = {"type": "integer", "description": "number"}
PARAMETERS = {"type": "object", "properties": {"place": PLACE, "days": DAYS}, "required": ["place"]}
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "weather", "parameters": PARAMETERS}}]
ASKED, ANSWERED = user("question first"), assistant("answer alpha")
CALLED = [ASKED, assistant(None, tool_calls=[call("Graz", 71)]), result("sunny"), ANSWERED]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASKED, ANSWERED]},
    "turns": {"messages": [ASKED, ANSWERED, user("query second"), assistant("reply beta")]},
    "system": {"messages": [{"role": "system", "content": "instruction"}, ASKED, ANSWERED]},
    "call": {"messages": CALLED, "tools": TOOLS},
    "parallel": {
        "messages": [
            ASKED, assistant(None, tool_calls=[call("Graz", 71), call("Linz", 83, "bcdefghij")]),
            result("sunny"), result("rainy", "bcdefghij"), ANSWERED,
        ],
        "tools": TOOLS,
    },
    "content": {"messages": [ASKED, {**CALLED[1], "content": "Searching"}, *CALLED[2:]], "tools": TOOLS},
    "last call": {"messages": CALLED[:2], "tools": TOOLS},
    "thought": {"messages": [ASKED, {**ANSWERED, "reasoning_content": "pondered"}]},
    "inline": {"messages": [ASKED, assistant("<think>\npondered\n</think>\n\nanswer alpha")]},
    "thoughts": {
        "messages": [
            ASKED, {**ANSWERED, "reasoning_content": "pondered"},
            user("query second"), assistant("reply beta", reasoning_content="mused"),
        ],
    },
    "thought call": {
        "messages": [
            ASKED, {**CALLED[1], "reasoning_content": "pondered"}, CALLED[2], {**ANSWERED, "reasoning_content": "mused"}
        ],
        "tools": TOOLS,
    },
}  # fmt: skip

# Why a row is refused.
TOOLS_LOST = r"does not render `tools`"
CALLS_LOST = r"does not render `messages\[1\]\.tool_calls`"
SECOND_LOST = r"does not render `messages\[1\]\.tool_calls\[1\]`.*in a message of its own"
CONTENT_LOST = r"does not render `messages\[1\]\.content`"
THOUGHT_LOST = r"does not render `messages\[\d\]\.reasoning_content`.*<think>…</think> before the answer"
UNOPENED = r"messages\[\d\].*prompt opens a thought"
AROUND = r"messages\[1\].*renders a part of it after messages\[2\]"
CLOSED = r"messages\[\d\] has a thought, but the chat template's prompt ends with an empty one"
ONE_CALL = r"refuses it: This model only supports single tool-calls"
DIFFERENT = r"messages\[3\].*differently"
LATE = r"messages\[1\].content has a thought.*`reasoning_content`"
NO_THOUGHTS = {"thought": THOUGHT_LOST, "thoughts": THOUGHT_LOST}
CALL_THOUGHT = {"thought call": THOUGHT_LOST}
NO_TOOLS = dict.fromkeys(["call", "parallel", "content", "last call", "thought call"], TOOLS_LOST)

# The kinds that each template does not train.
REFUSED: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        [
            "cohere", "cohere2", "gemma3", "idefics3", "llama3", "llava_next", "phi3", "phi3_5", "qwen2_5_vl",
            "smolvlm",
        ],
        NO_TOOLS | NO_THOUGHTS,
    ),
    "gemma": NO_TOOLS | NO_THOUGHTS | {"system": "System role not supported"},
    "deepseek_r1_distill": NO_TOOLS
    | dict.fromkeys(["plain", "turns", "system"], UNOPENED)
    | {"thought": r"`messages\[1\]\.reasoning_content`", "thoughts": r"`messages\[3\]\.reasoning_content`"}
    | {"inline": r"does not render the thought in `messages\[1\]\.content`"},
    **{name: {"content": AROUND} for name in ("diffusion_gemma", "gemma4_v5")},
    **dict.fromkeys(["gemma4", "gemma4_v3", "gemma4_v4"], NO_THOUGHTS | CALL_THOUGHT | {"content": AROUND}),
    "gemma4_v2": NO_THOUGHTS | {"thought call": THOUGHT_LOST},
    "gptoss": {"parallel": SECOND_LOST, "content": CONTENT_LOST, "thought call": DIFFERENT},
    "lfm2": dict.fromkeys(["call", "parallel", "content", "last call", "thought call"], CALLS_LOST) | NO_THOUGHTS,
    **dict.fromkeys(["lfm2_v2", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl"], NO_THOUGHTS | CALL_THOUGHT),
    **dict.fromkeys(
        ["llama3_1", "llama3_2"],
        NO_THOUGHTS | {"parallel": ONE_CALL, "content": CONTENT_LOST, "thought call": THOUGHT_LOST},
    ),
    "muse_glimmer": {"content": CONTENT_LOST},
    "qwen3_5_nothink": dict.fromkeys(["thought", "inline", "thoughts", "thought call"], CLOSED),
    "qwen3_8": {"inline": LATE},
}  # fmt: skip
REFUSED["deepseekv3"] = REFUSED["deepseek_r1_distill"]
MARKED = sorted(path.stem for path in PUBLISHED.glob("*_training.jinja"))
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.jinja") if path.stem not in MARKED)


def words(value: Any) -> set[str]:
    """The words of a row that are in it once."""
    return set(re.findall(r"\w+", str(value).replace("\\n", " "))) & WORDS


WORDS = {
    "question", "first", "answer", "alpha", "query", "second", "reply", "beta", "instruction", "Graz", "Linz", "71",
    "83", "sunny", "rainy", "Searching", "pondered", "mused", "weather", "settlement", "number",
}  # fmt: skip


def check_trained(row: dict[str, Any], tokenizer: Any) -> None:
    """The words of the assistant are trained once, from where the prompt ends to an end token, and no others."""
    example = FORMATS["messages"].read(row)
    assert isinstance(example, Chat)
    [segment] = chat.encode(example, tokenizer).segments
    whole = tokenizer.decode(segment.input_ids)
    labels = [label for label in segment.labels if label != -100]
    trained = re.findall(r"\w+", tokenizer.decode(labels))
    said = [message for message in row["messages"] if message["role"] == "assistant"]
    lost = [message for message in said if "reasoning_content" in message and message is not said[-1]
            and message["reasoning_content"] not in trained]  # fmt: skip
    assert segment.lost_thoughts == bool(lost)
    spoken = [message for message in said if message not in lost]
    expected = words(spoken)
    assert {word for word in trained if word in WORDS} == expected
    assert all(trained.count(word) == 1 for word in expected)
    missing = words(row) - set(re.findall(r"\w+", whole)) - {message["reasoning_content"] for message in lost}
    assert not missing
    # The last answer: after what generation is asked with, but for an empty thought.
    last = next(n for n, message in reversed(list(enumerate(row["messages"]))) if message["role"] == "assistant")
    first = max(n for n, label in enumerate(segment.labels[:-1], 1) if label == -100 and segment.labels[n] != -100)
    prompt = tokenizer.decode(chat.prompt_ids(Chat(example.messages[:last], tools=example.tools), tokenizer))
    before = tokenizer.decode(segment.input_ids[:first])
    assert re.fullmatch(
        r"\s*(<think>)?\s*(</think>)?\s*|<\|turn>model\n", before.removeprefix(prompt.removesuffix("<think>\n"))
    )
    end = max(n for n, label in enumerate(segment.labels) if label != -100)
    assert segment.input_ids[end] in tokenizer.all_special_ids
    assert not words(tokenizer.decode(segment.input_ids[end + 1 :]))


# One of those that treat these rows alike, and of each way to write calls and thoughts.
OFTEN = [
    "deepseek_r1_distill", "gemma", "gemma4_v3", "gemma4_v5", "glm4moe", "gptoss", "idefics3", "lfm2", "llama3",
    "llama3_1", "muse_glimmer", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_8",
]  # fmt: skip


def templates(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; older versions of trl have fewer."""
    found = sorted(names)
    return sampled(found, *(name for name in found if name.removesuffix("_training") in OFTEN))


def encode(row: dict[str, Any], tokenizer: Any) -> Any:
    return chat.encode(FORMATS["messages"].read(row), tokenizer)


def check(kinds: Iterable[str], name: str, tokenizer: Any, subtests: pytest.Subtests) -> None:
    refused = REFUSED.get(name, {})
    for kind in kinds:
        with subtests.test(kind=kind):
            if kind in refused:
                with pytest.raises(RowError, match=refused[kind]):
                    encode(KINDS[kind], tokenizer)
            else:
                check_trained(KINDS[kind], tokenizer)


@pytest.mark.parametrize("name", templates(MARKED))
def test_marks_train_no_word_of_another_and_nothing_that_the_prompt_writes(
    name: str, subtests: pytest.Subtests
) -> None:
    kinds = ("plain", "turns", "call", "parallel", "content", "last call")
    check(kinds, name.removesuffix("_training"), tokenizer_of(name), subtests)


@contextlib.contextmanager
def beginning(tokenizer: Any, change: str) -> Iterator[None]:
    """The tokenizer's template with a change of its variables before it."""
    own = tokenizer.chat_template
    tokenizer.chat_template = change + own
    try:
        yield
    finally:
        tokenizer.chat_template = own


def with_message(turn: int, changed: str) -> str:
    """What replaces the message of this index."""
    return f"{{%- set messages = messages[:{turn}] + [{changed}] + messages[{turn + 1}:] -%}}"


# What a template may make of a message's content: nothing, or all but a word.
LOSSES = ("''", "messages[{0}].content.replace('first', '').replace('alpha', '')")


def check_losses(tokenizer: Any) -> None:
    """A rendering without a word of the row is refused. One template, compiled once, loses what the question asks."""
    ways = [(LOSSES[0], 0, "assistant"), (LOSSES[0], 1, "all"), (LOSSES[1], 0, "all"), (LOSSES[1], 1, "assistant")]
    change = "".join(
        f"{{%- if 'lose {number}' in messages[0].content -%}}"
        + with_message(turn, f"dict(messages[{turn}], content={content.format(turn)})") + "{%- endif -%}"
        for number, (content, turn, _) in enumerate(ways)
    )  # fmt: skip
    with beginning(tokenizer, change):
        for number, (_, turn, loss_on) in enumerate(ways):
            asked = user(f"question first lose {number}")
            with pytest.raises(RowError, match=rf"does not render `messages\[{turn}\]\.content`"):
                chat.encode(Chat([asked, ANSWERED]), tokenizer, loss_on)  # type: ignore[arg-type]


# Trimmed, within JSON, as Python writes it; two equal calls are two.
ARGUMENTS = {
    "place": "Gr\"az'\n ü", "deep": {"on": True, "none": None, "list": ["a", 1, -2.5, []]},
    "big": 12345678901234567890, "small": 1e-7, "blank": " ", "empty": {},
}  # fmt: skip
ODD_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "lookup", "arguments": ARGUMENTS}}
ODD = {
    "messages": [
        user(" \n question </think> {{ x }} \n"),
        assistant(None, tool_calls=[ODD_CALL, {**ODD_CALL, "id": "bcdefghij"}]),
        result('{"temp": "hot \\n", "n": 3}'), result("x", "bcdefghij"),
        assistant("\n\nanswer \"x\"\n\n<b> & 'c' ")
    ],
    "tools": TOOLS,
}  # fmt: skip


@pytest.mark.parametrize("name", templates(NAMES))
def test_a_row_is_trained_as_its_person_wrote_it_or_refused_with_the_reason(
    name: str, subtests: pytest.Subtests
) -> None:
    tokenizer = tokenizer_of(name)
    check(KINDS, name, tokenizer, subtests)
    with subtests.test(kind="odd"):
        if "parallel" not in REFUSED.get(name, {}):
            assert encode(ODD, tokenizer).trained
    with subtests.test(kind="a rendering without a word"):
        if name not in ("idefics3", "llava_next", "smolvlm"):  # whose contents are lists of parts
            check_losses(tokenizer)


WITHOUT_ARGUMENTS = (
    "dict(messages[1], tool_calls=[messages[1].tool_calls[0], dict(messages[1].tool_calls[1], "
    "function=dict(name=messages[1].tool_calls[1].function.name, arguments={}))])"
)


@pytest.mark.parametrize("name", [name for name in ("qwen3", "qwen3_5_think", "glm4moe", "gemma4_v5") if name in NAMES])
def test_a_part_of_a_call_or_a_tool_that_a_template_leaves_out_is_named(name: str) -> None:
    """As test_outlines.py has it of templates of a line each."""
    tokenizer = tokenizer_of(name)
    bare = {**call("Linz", 83, "bcdefghij"), "function": {"name": "other", "arguments": {}}}
    calling = {
        "messages": [ASKED, assistant(None, tool_calls=[call("Graz", 71), bare]), *KINDS["parallel"]["messages"][2:]]
    }
    other = {"type": "function", "function": {**TOOLS[0]["function"], "name": "other"}}
    first = "dict(messages[1], tool_calls=messages[1].tool_calls[:1])"
    second = r"messages\[1\]\.tool_calls\[1\]"
    for row, change, lost in (
        (KINDS["parallel"], with_message(1, first), second),
        ({**calling, "tools": TOOLS}, with_message(1, first), second),
        (
            KINDS["parallel"],
            with_message(1, "dict(messages[1], tool_calls=[], content='x')"),
            r"messages\[1\]\.tool_calls`",
        ),
        (KINDS["parallel"], with_message(1, WITHOUT_ARGUMENTS), rf"{second}\.function\.arguments"),
        ({"messages": CALLED, "tools": [*TOOLS, other]}, "{%- set tools = tools[:1] -%}", r"tools\[1\]"),
    ):
        assert encode(row, tokenizer).trained
        with beginning(tokenizer, change), pytest.raises(RowError, match=rf"does not render `{lost}"):
            encode(row, tokenizer)


@pytest.mark.parametrize("name", [name for name in ("qwen3", "qwen3_5_think", "glm4moe", "gemma4_v5") if name in NAMES])
@pytest.mark.parametrize(
    ("arguments", "written", "lost"),
    [
        ({"on": True, "days": 3}, "dict(it.items() | rejectattr(1, 'boolean') | list)", r"\.on"),
        ({"on": None}, "{}", ""),
        ({"on": [7, None]}, "dict.fromkeys(it, it.values() | first | reject('none') | list)", r"\.on\[1\]"),
    ],
)
def test_a_boolean_or_null_that_a_template_leaves_out_is_named(
    name: str, arguments: dict[str, Any], written: str, lost: str
) -> None:
    tokenizer, called = tokenizer_of(name), call("Graz", 71)
    called["function"]["arguments"] = arguments
    row = {"messages": [ASKED, assistant(None, tool_calls=[called])], "tools": TOOLS}
    assert encode(row, tokenizer).trained
    function = f"dict(name=messages[1].tool_calls[0].function.name, arguments={written})"
    calls = f"[dict(messages[1].tool_calls[0], function={function})]"
    change = (
        "{%- if messages[1:] -%}{%- set it = messages[1].tool_calls[0].function.arguments -%}"
        f"{{%- set messages = messages[:1] + [dict(messages[1], tool_calls={calls})] -%}}{{%- endif -%}}"
    )
    where = r"messages\[1\]\.tool_calls\[0\]\.function\.arguments" + lost
    with beginning(tokenizer, change), pytest.raises(RowError, match=f"does not render `{where}`"):
        encode(row, tokenizer)
