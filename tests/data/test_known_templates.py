"""Facts about the masks of the field's chat templates, token by token, for one conversation of two turns.

Each template as models ship it has no generation marks; ours has. Both must give the same ids and the same mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conversations import TEMPLATES, TWO_TURNS, assistant, system, trained_text, trained_tokens, user
from known_templates import KNOWN, VARIANTS, texts

from finetune.data.chat import encode, heads, is_empty
from finetune.data.encoded import IGNORE, Encoded
from finetune.data.examples import Chat, RowError
from finetune.data.formats import FORMATS
from finetune.data.lengths import shortened
from finetune.data.masks import marks_generation
from finetune.model.source.chat_template import end_of_turn, stop_ids

Make = Callable[..., Any]

HELLO = ["Hello", " ", "there", "."]
BECAUSE = ["Because", " ", "so", "."]

# Every trained token of `TWO_TURNS`, in order.
TRAINED = {
    "chatml": [*HELLO, "<|im_end|>", *BECAUSE, "<|im_end|>"],
    "llama2": [" ", *HELLO, " ", "</s>", " ", *BECAUSE, " ", "</s>"],
    "llama3": [*HELLO, "<|eot_id|>", *BECAUSE, "<|eot_id|>"],
    "mistral": [" ", *HELLO, "</s>", " ", *BECAUSE, "</s>"],
    "gemma": [*HELLO, "<end_of_turn>", *BECAUSE, "<end_of_turn>"],
    "phi3": [*HELLO, "<|end|>", *BECAUSE, "<|end|>"],
    "qwen2_5": [*HELLO, "<|im_end|>", *BECAUSE, "<|im_end|>"],
    "qwen3": [*HELLO, "<|im_end|>", *BECAUSE, "<|im_end|>"],
    "plain": [*HELLO, "</s>", *BECAUSE, "</s>"],
}


def conversation(name: str) -> Chat:
    return Chat(TWO_TURNS if KNOWN[name].has_system else TWO_TURNS[1:])


@pytest.fixture
def tokenizer_of(word_tokenizer: Make) -> Make:
    return lambda name, variant: KNOWN[name].tokenizer(word_tokenizer, texts(name)[variant])


def test_every_known_template_is_pinned() -> None:
    assert set(TRAINED) == set(KNOWN)
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} - {"mistral_tools"} <= set(KNOWN)


def test_the_trained_tokens_are_these(tokenizer_of: Make) -> None:
    for name, variant in VARIANTS:
        tokenizer = tokenizer_of(name, variant)
        assert marks_generation(tokenizer) == (variant != "shipped")
        last = len(TRAINED[name]) - TRAINED[name].index(KNOWN[name].end) - 1
        for loss_on, trained in (("assistant", TRAINED[name]), ("last", TRAINED[name][-last:])):
            encoded = encode(conversation(name), tokenizer, loss_on)
            assert tokenizer.convert_ids_to_tokens(trained_tokens(encoded)) == trained, (name, variant)
        # The end of turn is found and generation stops there.
        assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == KNOWN[name].end
        assert set(tokenizer.convert_ids_to_tokens(stop_ids(tokenizer))) == {KNOWN[name].end, KNOWN[name].eos}


def test_our_template_gives_the_ids_and_the_mask_of_the_one_that_models_ship(tokenizer_of: Make) -> None:
    for name in [name for name in KNOWN if len(texts(name)) > 1]:
        shipped, ours = (tokenizer_of(name, variant) for variant in ("shipped", "ours"))
        for messages in (conversation(name).messages, TWO_TURNS[1:], TWO_TURNS[1:3]):
            assert encode(Chat(messages), shipped) == encode(Chat(messages), ours), name
            prompts = [
                tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
                for tokenizer in (shipped, ours)
            ]
            assert prompts[0] == prompts[1], name


def test_the_pad_token_changes_nothing_even_where_it_is_the_end_of_turn(tokenizer_of: Make) -> None:
    for name, variant in VARIANTS:
        tokenizer, known = tokenizer_of(name, variant), KNOWN[name]
        before = encode(conversation(name), tokenizer)
        assert before.labels.count(tokenizer.convert_tokens_to_ids(known.end)) == 2
        for pad in (known.end, known.eos, None):
            tokenizer = tokenizer_of(name, variant)
            tokenizer.pad_token = pad
            assert encode(conversation(name), tokenizer) == before, (name, variant, pad)


def test_what_a_template_refuses_is_refused_with_what_to_do(tokenizer_of: Make) -> None:
    system = r"System role not supported.*start of the first user message.*`data\.chat_template`"
    for variant in ("shipped", "ours"):
        with pytest.raises(RowError, match=system):
            encode(Chat(TWO_TURNS), tokenizer_of("gemma", variant))
    for name in ("llama2", "mistral", "gemma"):
        with pytest.raises(RowError, match=r"must alternate.* Merge consecutive messages"):
            encode(Chat([user("Hi"), user("Why?"), assistant("so")]), tokenizer_of(name, "ours"))


def test_thoughts_are_learnt_in_the_last_turn_as_the_template_renders_them(tokenizer_of: Make) -> None:
    """Qwen 3 leaves out what was thought in earlier turns, so these are not trained."""
    tokenizer = tokenizer_of("qwen3", "shipped")
    messages = [user("Hi"), assistant("<think>\none\n</think>\n\nHello"), user("Why?")]
    text = trained_text(encode(Chat([*messages, assistant("<think>\ntwo\n</think>\n\nso")]), tokenizer), tokenizer)
    assert text == "<think>\ntwo\n</think>\n\nso<|im_end|>"


# -- tools -----------------------------------------------------------------------------------------------------------

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
SUM = [
    user("What is one and two?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"},
    assistant("It is 3."),
]


def with_tools(messages: list[Any]) -> Any:
    return FORMATS["messages"].read({"messages": messages, "tools": [ADD]})


@pytest.fixture
def qwen(byte_tokenizer: Make) -> Any:
    return KNOWN["qwen2_5"].tokenizer(byte_tokenizer, texts("qwen2_5")["shipped"])


@pytest.fixture
def mistral(byte_tokenizer: Make) -> Any:
    return KNOWN["mistral"].tokenizer(byte_tokenizer, (TEMPLATES / "mistral_tools.jinja").read_text(encoding="utf-8"))


def test_qwen_learns_the_call_and_the_answer_and_not_the_result(qwen: Any) -> None:
    encoded = encode(with_tools(SUM), qwen)
    assert trained_text(encoded, qwen) == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>It is 3.<|im_end|>'
    )
    assert '"parameters"' in qwen.decode(encoded.input_ids)
    assert "<tool_response>\n3\n</tool_response>" in qwen.decode(encoded.input_ids)


def test_mistral_learns_the_call_and_the_answer_and_not_the_result(mistral: Any) -> None:
    encoded = encode(with_tools(SUM), mistral)
    assert trained_text(encoded, mistral) == (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]</s> It is 3.</s>'
    )


def test_tools_that_move_to_the_last_question_are_refused_but_for_the_last_answer(mistral: Any) -> None:
    """Mistral renders them with the last question, so an earlier answer was never given after what is rendered now."""
    messages = [user("Hi"), assistant("Hello"), *SUM]
    with pytest.raises(RowError, match=r"messages\[1\].*differently"):
        encode(with_tools(messages), mistral)
    assert trained_text(encode(with_tools(messages), mistral, "last"), mistral) == " It is 3.</s>"


def test_tools_that_the_template_would_leave_out_are_refused(tokenizer_of: Make) -> None:
    tokenizer = tokenizer_of("llama3", "ours")
    for row in ({"messages": SUM}, {"messages": [user("Hi"), assistant("so")], "tools": [ADD]}):
        with pytest.raises(RowError, match=r"does not render `(messages\[1\]\.tool_calls|tools)`"):
            encode(FORMATS["messages"].read(row), tokenizer)
    assert not is_empty(with_tools(SUM[:2])), "a call is an answer"


LONG = [user("Why? " * 40), *SUM[1:3], *SUM[1:3], assistant("It is 3.")]


@pytest.mark.parametrize("name", ["qwen2_5", "mistral_tools"])
@pytest.mark.parametrize(
    "messages", [LONG, [system("Be brief."), *LONG], [user("Hi"), assistant("Hello. " * 40), *LONG[1:]]]
)
def test_a_row_that_is_cut_keeps_the_definitions_of_its_tools_or_is_dropped(
    byte_tokenizer: Make, name: str, messages: list[Any]
) -> None:
    if messages[0]["role"] == "system" and name == "mistral_tools":
        messages = messages[1:]
    known = KNOWN[name.removesuffix("_tools")]
    tokenizer = known.tokenizer(byte_tokenizer, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    row = with_tools(messages)
    whole = encode(row, tokenizer, "last").segments[0]
    [head] = heads([(row, whole)], tokenizer)
    first, after = head.tools
    block = tokenizer.decode(whole.input_ids[first:after])
    definition = '"parameters": {"type": "object", "properties": {}}'
    assert definition in block
    assert "Why?" not in block
    limits = range(after - first, len(whole.input_ids), 7)
    kept = []
    for limit in limits:
        what, pieces = shortened(Encoded((replace(whole, head=head),)), limit, "truncate")
        for piece in pieces:
            text = tokenizer.decode(piece.input_ids)
            assert len(piece.input_ids) == limit
            assert text.count(block) == 1
            assert text.endswith(f"It is 3.{known.end}")
        kept.append(bool(pieces))
        assert (what == "dropped") == (not pieces)
    assert kept == sorted(kept), "a row with more room is not dropped"
    assert kept[-1]


@pytest.mark.parametrize("name", ["qwen2_5", "mistral_tools"])
def test_each_trained_piece_of_a_row_that_is_split_has_the_definitions_of_its_tools(
    byte_tokenizer: Make, name: str
) -> None:
    known = KNOWN[name.removesuffix("_tools")]
    tokenizer = known.tokenizer(byte_tokenizer, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    row = with_tools([user("Why? "), *SUM[1:3], *SUM[1:3], assistant("It is 3. " * 50)])
    whole = encode(row, tokenizer).segments[0]
    [head] = heads([(row, whole)], tokenizer)
    first, after = head.tools
    block = tokenizer.decode(whole.input_ids[first:after])
    assert '"name": "add"' in block
    limits = range((after - first) // 2, len(whole.input_ids), 37)
    made = {limit: shortened(Encoded((replace(whole, head=head),)), limit, "split")[1] for limit in limits}
    assert not made[limits[0]]
    assert made[limits[-1]]
    for limit, pieces in made.items():
        trained = [token for piece in pieces for token in piece.labels[1:] if token != IGNORE]
        assert not pieces or trained == [token for token in whole.labels if token != IGNORE]
        for piece in (piece for piece in pieces if piece.trained):
            assert len(piece.input_ids) <= limit
            assert tokenizer.decode(piece.input_ids).count(block) == 1


def test_a_row_that_is_cut_keeps_no_first_token_but_bos(byte_tokenizer: Make) -> None:
    """SmolLM's tokenizer calls ChatML's `<|im_start|>` its BOS."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    example = Chat([user("Why? " * 40), assistant("so")])
    for bos in (None, "<s>", "<|im_start|>"):
        named = {"bos_token": bos} if bos else {}
        tokenizer = byte_tokenizer("<s>" * (bos == "<s>") + template, special=["<s>"], **named)
        whole = encode(example, tokenizer).segments[0]
        [head] = heads([(example, whole)], tokenizer)
        _, [cut] = shortened(Encoded((replace(whole, head=head),)), 40, "truncate")
        begins = "<s>" if bos == "<s>" else ("Why?", " Why?", "?", "y", "hy", " ")
        assert tokenizer.decode(cut.input_ids).startswith(begins), bos


# -- marks that are not quite right ----------------------------------------------------------------------------------


def test_an_end_of_turn_that_is_parsed_within_an_answer_is_refused_with_its_position(
    word_tokenizer: Make, chatml: str
) -> None:
    with pytest.raises(RowError, match=r"messages\[1\].content contains the end-of-turn token `<\|im_end\|>`"):
        encode(Chat([user("Hi"), assistant("so<|im_end|>so")]), word_tokenizer(chatml), control_tokens="parse")


# -- what a message says of itself -----------------------------------------------------------------------------------


def test_a_turn_that_is_switched_off_is_context(tokenizer_of: Make) -> None:
    tokenizer = tokenizer_of("chatml", "shipped")
    for switch in ({"train": False}, {"weight": 0}, {"weight": 0.0}):
        for loss_on in ("assistant", "last"):
            turns = [system("Be brief."), user("Hi"), assistant("Hello"), user("Why?"), {**assistant("so"), **switch}]
            encoded = encode(FORMATS["messages"].read({"messages": turns}), tokenizer, loss_on)
            assert trained_text(encoded, tokenizer) == "Hello<|im_end|>"
            assert "so<|im_end|>" in tokenizer.decode(encoded.input_ids)
