"""Rows of text that a chat template has rendered (`data.control_tokens: parse`) have the tokens of the conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conversations import TWO_TURNS, assistant, trained_text, user
from known_templates import KNOWN, VARIANTS, texts
from tokenizers.processors import TemplateProcessing

from finetune.data.chat import encode, prompt_ids
from finetune.data.examples import Chat, Completion, Example, Several, Text

Make = Callable[..., Any]

AROUND = {"nothing": "$A", "BOS": "<s> $A", "BOS and EOS": "<s> $A </s>"}


def tokenizer_of(make: Make, name: str, variant: str, around: str) -> Any:
    """A tokenizer with a known template that writes BOS, or BOS and EOS, around a text, or nothing."""
    tokenizer = KNOWN[name].tokenizer(make, texts(name)[variant])
    if not tokenizer.bos_token:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
    named = {"<s>": tokenizer.bos_token, "</s>": tokenizer.eos_token}
    single = " ".join(named.get(part, part) for part in AROUND[around].split())
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in named.values()]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


CASES = [(*each, around) for each in VARIANTS for around in AROUND]


def conversation(name: str) -> list[dict[str, Any]]:
    return TWO_TURNS if KNOWN[name].has_system else TWO_TURNS[1:]


def parsed(example: Example, tokenizer: Any, loss_on: Any = "assistant") -> Any:
    return encode(example, tokenizer, loss_on, "parse").segments[0]


@pytest.mark.parametrize(("name", "variant", "around"), CASES)
def test_a_rendered_row_has_the_tokens_and_labels_of_its_conversation(
    byte_tokenizer: Make, name: str, variant: str, around: str
) -> None:
    tokenizer, messages = tokenizer_of(byte_tokenizer, name, variant, around), conversation(name)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    all_of_it, last = (encode(Chat(messages), tokenizer, loss_on).segments[0] for loss_on in ("all", "last"))
    text = parsed(Text(whole), tokenizer)
    assert (text.input_ids, text.labels) == (all_of_it.input_ids, all_of_it.labels)
    assert parsed(Text(whole), tokenizer, "end").input_ids == all_of_it.input_ids
    completion = Completion(prompt, whole.removeprefix(prompt))
    row = parsed(completion, tokenizer)
    assert row.input_ids == last.input_ids
    if name != "qwen3":  # whose empty thought before the answer is part of the completion
        assert row.labels == last.labels
    pair = encode(Several({"chosen": completion, "rejected": completion}), tokenizer, control_tokens="parse")
    assert [each.labels for each in pair.segments] == [row.labels] * 2
    asked = prompt_ids(Completion(prompt, ""), tokenizer, "parse")
    assert asked == prompt_ids(Chat(messages[:-1]), tokenizer)
    assert asked == last.input_ids[: len(asked)]


@pytest.mark.parametrize(("name", "variant", "around"), CASES)
def test_a_rendered_row_without_its_bos_or_its_end_gets_them(
    byte_tokenizer: Make, name: str, variant: str, around: str
) -> None:
    """As transformers' guide has it, whose tokenizer then adds BOS; and a completion is often the words alone."""
    tokenizer, messages = tokenizer_of(byte_tokenizer, name, variant, around), [user("Hi"), assistant("Because so.")]
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    row = parsed(Completion(prompt.removeprefix(tokenizer.bos_token), "Because so."), tokenizer)
    asked = prompt_ids(Chat(messages[:-1]), tokenizer)
    assert around == "nothing" or row.input_ids[: len(asked)] == asked
    assert trained_text(row, tokenizer) == f"Because so.{KNOWN[name].end}"


def test_a_turn_that_the_template_leaves_open_is_closed_as_in_conversations(byte_tokenizer: Make) -> None:
    """GLM's answers end where the user's next message begins."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = byte_tokenizer(template, special=["<|user|>", "<|assistant|>"])
    messages = [user("Hi"), assistant("so")]
    expected = encode(Chat(messages), tokenizer).segments[0]
    row = parsed(Completion("<|user|>Hi<|assistant|>", "so"), tokenizer)
    assert (row.input_ids, row.labels) == (expected.input_ids, expected.labels)
    assert parsed(Text("<|user|>Hi<|assistant|>so"), tokenizer).input_ids == expected.input_ids


def test_a_text_that_no_template_has_rendered_is_as_before(byte_tokenizer: Make) -> None:
    for around in AROUND:
        tokenizer = tokenizer_of(byte_tokenizer, "llama3", "ours", around)
        words = tokenizer("Hello there", add_special_tokens=False)["input_ids"]
        start = [*([] if around == "nothing" else [tokenizer.bos_token_id]), *words]
        for policy in ("text", "parse"):
            for text in ("Hello there", "Hello there<|end_of_text|>"):
                ids = encode(Text(text), tokenizer, control_tokens=policy).input_ids
                assert ids == [*start, tokenizer.eos_token_id], around
            assert prompt_ids(Completion("Hello there", ""), tokenizer, policy) == start
        escaped = encode(Text("<|begin_of_text|>Hello"), tokenizer)
        assert escaped.input_ids.count(tokenizer.bos_token_id) == (around != "nothing")
