"""Facts about masks and cuts that hold for every conversation and every known template, tried on random ones."""

from __future__ import annotations

from typing import Any

import pytest
from conversations import assistant, system, trained_text, trained_tokens, user
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from known_templates import KNOWN

from finetune.data.chat import encode, encode_all
from finetune.data.encoded import IGNORE, Encoded, Segment
from finetune.data.examples import Chat, Completion, Example, Message, RowError, Text, Tokens
from finetune.data.lengths import TOO_LONG
from finetune.data.masks import marks_generation

# No `<`, which opens the special tokens.
_CONTENT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12) | st.sampled_from(
    ["", " ", "\n", "\n\n", "\t ", " hello", "the answer \n", "assistant\n", "[INST] user [/INST]", "{{ bos_token }}"]
)
_SYSTEM = st.none() | st.builds(system, _CONTENT)
_PAIRS = st.lists(st.tuples(st.builds(user, _CONTENT), st.builds(assistant, _CONTENT)), min_size=1, max_size=3)
_CONVERSATION = st.builds(
    lambda opening, pairs: [*([opening] if opening else []), *(message for pair in pairs for message in pair)],
    _SYSTEM,
    _PAIRS,
)
_TRIED = settings(max_examples=12)


def rendered(messages: list[Message], name: str) -> list[Message]:
    """The messages without what the template knows no place for."""
    return messages if KNOWN[name].has_system or messages[0]["role"] != "system" else messages[1:]


def runs(labels: list[int]) -> list[tuple[int, int]]:
    """Where each unbroken run of trained tokens starts and ends."""
    edges = [i for i, (a, b) in enumerate(zip([IGNORE, *labels], [*labels, IGNORE], strict=True))
             if (a == IGNORE) != (b == IGNORE)]  # fmt: skip
    return list(zip(edges[::2], edges[1::2], strict=True))


@_TRIED
@given(messages=_CONVERSATION)
def test_each_trained_run_is_one_answer_with_its_end_of_turn_in_the_tokens_that_transformers_gives(
    known: tuple[str, Any], messages: list[Message]
) -> None:
    name, tokenizer = known
    messages = rendered(messages, name)
    every, last, whole = (encode(Chat(messages), tokenizer, loss_on) for loss_on in ("assistant", "last", "all"))
    marked = name == "chatml" and marks_generation(tokenizer)
    given = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked)
    assert every.input_ids == last.input_ids == whole.input_ids == given["input_ids"]
    assert all(label in (IGNORE, token) for token, label in zip(every.input_ids, every.labels, strict=True))
    if marked:
        assert [label != IGNORE for label in every.labels] == [bool(bit) for bit in given["assistant_masks"]]

    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    said = [KNOWN[name].said(messages[index]["content"], index == answers[-1]) for index in answers]
    assert [tokenizer.decode(every.input_ids[start:end]) for start, end in runs(every.labels)] == said
    assert every.labels.count(tokenizer.convert_tokens_to_ids(KNOWN[name].end)) == len(answers)
    assert runs(last.labels) == runs(every.labels)[-1:]
    assert trained_tokens(every)[-len(trained_tokens(last)) :] == trained_tokens(last)

    # All that a person wrote is in the tokens once and in order.
    text, at = "".join(tokenizer.decode(every.input_ids).split()), 0
    contents = ["".join(message["content"].split()) for message in messages]
    for content in contents:
        at = text.index(content, at) + len(content)
    if all(contents):  # some templates leave out the frame of an empty message
        empty = encode(Chat([{**message, "content": ""} for message in messages]), tokenizer).input_ids
        assert len(text) == len("".join(tokenizer.decode(empty).split())) + len("".join(contents))


@_TRIED
@given(messages=_CONVERSATION, loss_on=st.sampled_from(["assistant", "last", "all"]), data=st.data())
def test_a_template_that_leaves_out_a_message_is_refused(
    known: tuple[str, Any], messages: list[Message], loss_on: Any, data: st.DataObject
) -> None:
    name, tokenizer = known
    messages = rendered(messages, name)
    turn = data.draw(st.integers(0, len(messages) - 1))
    assume(messages[turn]["content"].strip())
    own = tokenizer.chat_template
    without = f"messages[:{turn}] + [dict(messages[{turn}], content='')] + messages[{turn + 1}:]"
    try:
        tokenizer.chat_template = f"{{%- set messages = {without} -%}}" + own
        with pytest.raises(RowError, match=rf"does not render `messages\[{turn}\]\.content`"):
            encode(Chat(messages), tokenizer, loss_on)
    finally:
        tokenizer.chat_template = own


@_TRIED
@given(messages=_CONVERSATION, data=st.data())
def test_a_truncated_row_keeps_the_last_answer_from_its_beginning_and_pieces_train_the_same_tokens(
    known: tuple[str, Any], messages: list[Message], data: st.DataObject
) -> None:
    name, tokenizer = known
    [whole] = encode(Chat(rendered(messages, name)), tokenizer).segments
    limit = data.draw(st.integers(2, len(whole.input_ids) - 1))
    _, pieces = TOO_LONG["split"].apply(whole, limit)
    first, *others = pieces
    assert first.input_ids + [token for piece in others for token in piece.input_ids[1:]] == whole.input_ids
    assert first.labels + [label for piece in others for label in piece.labels[1:]] == whole.labels
    assert sum(piece.trained for piece in pieces) == whole.trained
    assert {len(piece.input_ids) for piece in pieces[:-1]} == {limit}
    assert 2 <= len(pieces[-1].input_ids) <= limit

    what, [cut] = TOO_LONG["truncate"].apply(whole, limit)
    assert len(cut.input_ids) == len(cut.labels) == limit
    assume(cut.trained)
    before, after = (
        [trained_text(Segment(row.input_ids[a:b], row.labels[a:b]), tokenizer) for a, b in runs(row.labels)]
        for row in (whole, cut)
    )
    assert before[-1].startswith(after[-1].rstrip("\ufffd"))
    assert after[:-1] == before[len(before) - len(after) : -1]
    assert (after[-1] == before[-1]) == (what == "truncated")
    start, end = runs(whole.labels)[-1]
    if end - start < limit:
        assert what == "truncated"


_ROLE = st.sampled_from(["system", "user", "assistant", "tool"])
_ANY = st.lists(st.builds(lambda role, content: {"role": role, "content": content}, _ROLE, _CONTENT), min_size=1)
_EXAMPLE = (
    st.builds(Chat, _CONVERSATION | _ANY)
    | st.builds(Completion, _CONTENT, _CONTENT)
    | st.builds(Text, _CONTENT)
    | st.sampled_from([Tokens([5, 6]), Tokens([5, 99_999]), Chat([{"role": "user", "content": "\ud800"}])])
)


@pytest.mark.slow
@_TRIED
@given(examples=st.lists(_EXAMPLE, max_size=4), loss_on=st.sampled_from(["assistant", "last", "all"]))
def test_rows_that_are_encoded_together_come_out_as_each_by_itself(
    known: tuple[str, Any], examples: list[Example], loss_on: Any
) -> None:
    """Refused ones among them, in the same words."""
    _, tokenizer = known

    def alone(example: Example) -> Encoded | str:
        try:
            return encode(example, tokenizer, loss_on)
        except RowError as error:
            return str(error)

    together = encode_all(examples, tokenizer, loss_on)
    assert [str(one) if isinstance(one, RowError) else one for one in together] == list(map(alone, examples))
