"""Thoughts in conversations: what the templates of reasoning models make of them, and what of it is trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from messages import refusal

from finetune.config import DataSection, ModelSection
from finetune.data import chat
from finetune.data.examples import Chat, RowError
from finetune.errors import ConfigError
from finetune.model.source import chat_template
from finetune.model.source.tokenizer import load_tokenizer

# Copies of the templates that models are published with.
PUBLISHED = Path(trl.__file__).parent / "chat_templates"
CONTROL = re.compile(r"<\|[a-z_]+\|?>|<[a-z_]+\|>|</?think>")


def tokenizer_of(name: str, **arguments: Any) -> Any:
    file = PUBLISHED / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"this version of trl has no {file.name}")
    tokenizer = load_tokenizer(ModelSection(), DataSection(chat_template=str(file), template_arguments=arguments))
    written = set(CONTROL.findall(file.read_text())) - {"<think>", "</think>"}
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(written)})
    return tokenizer


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str, thought: str = "") -> dict[str, str]:
    return {"role": "assistant", "content": content} | ({"reasoning_content": thought} if thought else {})


ANSWER = [user("q"), assistant("one")]
THOUGHT = [user("q"), assistant("one", "why")]
ANSWERS = [*ANSWER, user("r"), assistant("two")]
THOUGHTS = [*THOUGHT, user("r"), assistant("two", "how")]


def trained(messages: list[dict[str, str]], tokenizer: Any) -> list[str]:
    """The trained stretches of a conversation, without white space around them."""
    [segment] = chat.encode(Chat(messages), tokenizer).segments
    stretches: list[list[int]] = [[]]
    for token, label in zip(segment.input_ids, segment.labels, strict=True):
        if label != -100:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(stretch).strip() for stretch in stretches if stretch]


@pytest.mark.parametrize(
    ("template", "end", "thought"),
    [
        ("qwen3", "<|im_end|>", "<think>\nhow\n</think>\n\n"),
        ("qwen3_5_think", "<|im_end|>", "how\n</think>\n\n"),  # the prompt ends with <think>
        ("glm4moe", "<|user|>", "<think>how</think>\n"),  # the next turn ends an answer
        ("nemotron_3_nano", "<|im_end|>", "how\n</think>\n"),
        ("gemma4_v5", "<turn|>", "<|channel>thought\nhow\n<channel|>"),
    ],
)
def test_answers_are_trained_without_empty_thoughts_and_earlier_turns_not_without_theirs(
    template: str, end: str, thought: str
) -> None:
    tokenizer = tokenizer_of(template)
    assert trained(ANSWER, tokenizer) == [f"one{end}"]
    assert trained(ANSWERS, tokenizer) == [f"one{end}", f"two{end}"]
    assert trained(THOUGHTS, tokenizer) == [f"{thought}two{end}"]
    [segment] = chat.encode(Chat(THOUGHTS), tokenizer).segments
    assert segment.lost_thoughts
    assert not chat.encode(Chat(THOUGHT), tokenizer).lost_thoughts


def test_an_earlier_turn_that_the_template_closes_otherwise_is_trained_without_its_end() -> None:
    tokenizer = tokenizer_of("gptoss")
    assert trained(ANSWERS, tokenizer) == ["<|channel|>final<|message|>one", "<|channel|>final<|message|>two<|return|>"]
    # Older versions of transformers do not give templates the name that this one reads.
    thoughts = [one | {"thinking": one["reasoning_content"]} if len(one) > 2 else one for one in THOUGHTS]
    assert trained(thoughts, tokenizer)[0].startswith("<|channel|>analysis<|message|>how")


@pytest.mark.parametrize("after", [[], [{"role": "tool", "content": "3"}, assistant("one")]])
def test_a_call_ends_with_the_token_that_begins_its_result_where_nothing_else_ends_it(after: list[Any]) -> None:
    tokenizer = tokenizer_of("glm4moe")
    called = {**assistant(""), "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    call, *answers = trained([user("q"), called, *after], tokenizer)
    assert call == "<tool_call>f\n</tool_call><|observation|>"
    assert answers == ["one<|user|>"] * bool(after)
    assert tokenizer.convert_tokens_to_ids("<|observation|>") in chat_template.stop_ids(tokenizer)


def test_a_thought_in_the_content_counts_as_one() -> None:
    inline = [user("q"), assistant("<think>\nwhy\n</think>\n\none"), user("r"), assistant("two")]
    assert trained(inline, tokenizer_of("qwen3")) == ["two<|im_end|>"]
    kept = ["why\n</think>\n\none<|im_end|>", "how\n</think>\n\ntwo<|im_end|>"]
    assert trained(THOUGHTS, tokenizer_of("qwen3_8")) == kept, "of a template that keeps those of earlier turns"


def test_a_thought_that_a_question_repeats_is_lost_all_the_same() -> None:
    for arguments in ({}, {"enable_thinking": False}):
        tokenizer = tokenizer_of("qwen3", **arguments)
        for first, second in (("why", "r"), ("q", "why")):
            messages = [user(first), assistant("one", "why"), user(second), assistant("two")]
            assert trained(messages, tokenizer) == ["two<|im_end|>"]


def asked(content: str) -> dict[str, str]:
    """A question that Qwen 3's template takes for the result of a call, and not for a question."""
    return user(f"<tool_response>\n{content}\n</tool_response>")


def test_a_thought_that_the_template_drops_for_what_a_question_says_is_lost_though_it_is_repeated() -> None:
    for arguments in ({}, {"enable_thinking": False}):
        tokenizer = tokenizer_of("qwen3", **arguments)
        for first, second in (("why", "r"), ("q", "why")):
            result = {"role": "tool", "content": second}
            messages = [asked(first), assistant("one", "why"), result, assistant("two")]
            assert trained(messages, tokenizer) == ["two<|im_end|>"]


def test_an_earlier_answer_that_loses_its_empty_thought_is_located_by_its_last_words() -> None:
    empty = assistant("<think>\n\n</think>\n\none")
    messages = [user("q"), empty, asked("r"), assistant("two", "how"), asked("s"), assistant("so")]
    assert trained(messages, tokenizer_of("qwen3")) == ["one<|im_end|>", "so<|im_end|>"]


def test_an_answer_whose_prompt_opens_or_closes_a_thought_otherwise_is_refused() -> None:
    with pytest.raises(RowError, match=r"messages\[1\]: the chat template's prompt opens a thought"):
        trained(ANSWER, tokenizer_of("deepseek_r1_distill"))
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    messages = [user("q"), assistant("", "why") | call, {"role": "tool", "content": "3"}, assistant("two")]
    with pytest.raises(RowError, match=r"messages\[1\] has a thought, but .* prompt ends with an empty one"):
        trained(messages, tokenizer_of("qwen3", enable_thinking=False))


def test_arguments_are_defaults_of_the_template_in_training_prompts_and_files(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3", enable_thinking=False)
    assert trained(ANSWERS, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    prompt = tokenizer.decode(chat.prompt_ids(Chat(ANSWER[:1]), tokenizer))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    tokenizer.save_pretrained(str(tmp_path))
    saved = DataSection(
        chat_template=str(tmp_path / "chat_template.jinja"), template_arguments={"enable_thinking": False}
    )
    assert load_tokenizer(ModelSection(), saved).chat_template == tokenizer.chat_template
    asked = tokenizer.apply_chat_template(ANSWER[:1], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert asked.endswith("assistant\n")
    with pytest.raises(RowError, match=r"messages\[1\] has a thought, but .* `data.template_arguments`"):
        chat.encode(Chat(THOUGHT), tokenizer)


def test_an_argument_that_the_template_does_not_read_is_refused() -> None:
    with refusal(ConfigError, "`data.template_arguments`", "`enable_thinkin`", "`enable_thinking`"):
        tokenizer_of("qwen3", enable_thinkin=False)
    with refusal(ConfigError, "`data.template_arguments`", "`enable_thinking`"):
        chat_template.with_defaults(chat_template.named("plain"), {"enable_thinking": False})
