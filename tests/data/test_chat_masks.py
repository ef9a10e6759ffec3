"""Facts about the label mask, token by token: each assistant turn with its end of turn, once, and nothing else.

A token in [brackets] is trained, one without is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conversations import TWO_TURNS, assistant, shown, system, trained_text, user
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refusal

from finetune.data.chat import encode
from finetune.data.encoded import IGNORE, Encoded, RowImage, Segment
from finetune.data.examples import Chat, Completion, Message, RowError, Text
from finetune.data.masks import marks_generation
from finetune.errors import ArtifactError
from finetune.model.source.chat_template import named

Make = Callable[..., Any]

PLAIN_TEMPLATE = named("plain")


@pytest.fixture(scope="session")
def unmarked(chatml: str) -> str:
    """ChatML as most models ship it: without generation marks."""
    return chatml.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


@pytest.fixture(scope="session")
def tight(unmarked: str) -> str:
    """As Llama 3 does it: nothing follows the end of a turn."""
    return unmarked.replace("{{- '\\n' -}}", "")


@pytest.fixture(scope="session")
def templates(chatml: str, unmarked: str, tight: str) -> dict[str, str]:
    return {"marked": chatml, "unmarked": unmarked, "tight": tight, "plain": PLAIN_TEMPLATE}


# -- pinned, token by token ------------------------------------------------------------------------------------------


ANSWERS = "[Hello][ ][there][.][>]", "[Because][ ][so][.][>]"
PINNED: dict[str, tuple[str, ...]] = {
    # The row's frame with places for its two answers, and the row where all of it is trained.
    "marked": (
        "<system/Be brief.>/<user/Hi>/<assistant/{}/<user/Why?>/<assistant/{}/",
        "[<][system][/][Be][ ][brief][.][>][/][<][user][/][Hi][>][/]"
        "[<][assistant][/][Hello][ ][there][.][>][/][<][user][/][Why][?][>][/]"
        "[<][assistant][/][Because][ ][so][.][>][/]",
    ),
    "tight": ("<system/Be brief.><user/Hi><assistant/{}<user/Why?><assistant/{}",),
    # Every role stands on a line of its own, as the template's text reads.
    "plain": ("### system:/Be brief./### user:/Hi/### assistant:/{}/### user:/Why?/### assistant:/{}/",),
}
PINNED["unmarked"] = PINNED["marked"]


def test_masks_token_by_token(word_tokenizer: Make, templates: dict[str, str], subtests: pytest.Subtests) -> None:
    for template, (frame, *whole) in PINNED.items():
        tokenizer = word_tokenizer(templates[template])
        assert marks_generation(tokenizer) == (template in ("marked", "plain"))
        expected = {"assistant": frame.format(*ANSWERS), "last": frame.format("Hello there.>", ANSWERS[1])}
        for loss_on, row in [*expected.items(), *(("all", row) for row in whole)]:
            with subtests.test(template=template, loss_on=loss_on):
                assert shown(encode(Chat(TWO_TURNS), tokenizer, loss_on), tokenizer) == row


def test_the_plain_template_begins_with_the_begin_token_where_there_is_one(word_tokenizer: Make) -> None:
    with_begin = word_tokenizer(PLAIN_TEMPLATE, bos_token="<|im_start|>")
    without = word_tokenizer(PLAIN_TEMPLATE)
    ids = encode(Chat(TWO_TURNS), with_begin).input_ids
    assert ids == [with_begin.bos_token_id, *encode(Chat(TWO_TURNS), without).input_ids]


def test_a_prompt_is_not_trained_and_its_completion_and_plain_text_are_with_one_end(word_tokenizer: Make) -> None:
    tokenizer = word_tokenizer(None)
    answer = "[Because][ ][so][.][>]"
    for loss_on, prompt in (("assistant", "Why? "), ("last", "Why? "), ("all", "[Why][?][ ]")):
        row = encode(Completion("Why? ", "Because so."), tokenizer, loss_on)
        assert shown(row, tokenizer) == prompt + answer
        assert shown(encode(Text("Because so."), tokenizer, loss_on), tokenizer) == answer


def test_an_answer_that_has_an_end_of_its_own_is_trained_to_it_and_gets_no_other(word_tokenizer: Make) -> None:
    tokenizer = word_tokenizer(None)
    for answer, row in [
        ("so<|im_end|>", "[so][>]"), ("so<|im_end|>\n", "[so][>]/"), ("so\n<|im_end|>\n\n", "[so][/][>]//"),
        ("so<|im_end|><|pad|>", "[so][>]_"), ("so<|im_end|><|im_end|>", "[so][>]>"),
        ("one<|im_end|>so", "[one][>][so][>]"), ("one<|im_end|>so\n", "[one][>][so][/][>]"),  # one amid it is no end
    ]:  # fmt: skip
        encoded = encode(Completion("Why?", answer), tokenizer, control_tokens="parse")
        assert shown(encoded, tokenizer) == "Why?" + row, answer


def test_an_answer_to_a_rendered_prompt_ends_as_a_turn_does_and_any_other_with_eos(
    word_tokenizer: Make, templates: dict[str, str]
) -> None:
    tokenizer = word_tokenizer(templates["marked"], special=["</s>"], eos_token="</s>")
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for prompt, row in ((rendered, "<user/Hi>/<assistant/[so][>]"), ("Why?", "Why?[so][</s>]")):
        assert shown(encode(Completion(prompt, "so"), tokenizer, control_tokens="parse"), tokenizer) == row


def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt(word_tokenizer: Make) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer(None)
    end = ("<|im_end|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=[end])
    assert shown(encode(Completion("Why?", "so"), tokenizer), tokenizer) == "Why?[so][>]"
    assert shown(encode(Text("so so"), tokenizer), tokenizer) == "[so][ ][so][>]"


def test_the_trained_text_of_odd_conversations(word_tokenizer: Make, templates: dict[str, str]) -> None:
    tool = {"role": "tool", "content": "two"}
    for template, text in templates.items():
        tokenizer = word_tokenizer(text)
        for messages, loss_on, expected in [
            ([user("Hi"), assistant("Hello"), user("Why?")], "assistant", "Hello<|im_end|>"),
            ([user("Hi"), assistant("Hello"), user("Why?")], "last", "Hello<|im_end|>"),
            ([user("Hi"), assistant("one"), assistant("two")], "last", "two<|im_end|>"),
            ([user("Hi"), assistant("one"), tool, assistant("so")], "assistant", "one<|im_end|>so<|im_end|>"),
        ]:
            assert trained_text(encode(Chat(messages), tokenizer, loss_on), tokenizer) == expected, template


def test_a_conversation_that_the_assistant_opens_needs_marks_or_an_empty_prompt(
    word_tokenizer: Make, templates: dict[str, str]
) -> None:
    """ChatML without marks opens with a system message of its own accord, so what precedes the answer is not known."""
    opened = Chat([assistant("Hello"), user("Hi"), assistant("so")])
    for template in ("marked", "plain"):
        tokenizer = word_tokenizer(templates[template])
        text = trained_text(encode(opened, tokenizer), tokenizer)
        assert text == "Hello<|im_end|>so<|im_end|>", template
    for template in ("unmarked", "tight"):
        with pytest.raises(RowError, match=r"messages\[0\]: if the assistant speaks first"):
            encode(opened, word_tokenizer(templates[template]))


def test_images_of_several_turns_are_not_trained_and_the_answers_are(
    word_tokenizer: Make, templates: dict[str, str]
) -> None:
    """Each has the text of its own tokens where the template writes `#`."""
    written = "message['content']|map(attribute='text', default='#')|join"
    parts = f"(message['content'] if message['content'] is string else {written})"
    first, second = (
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]} for text in ("Hi", "Why?")
    )
    images = RowImage(mark="#", text="::"), RowImage(mark="#", text=".")
    example = Chat([first, assistant("one"), second, assistant("two")], images=images)
    for template in ("marked", "unmarked"):
        tokenizer = word_tokenizer(templates[template].replace("message['content']", parts))
        assert shown(encode(example, tokenizer), tokenizer) == (
            "<user/Hi::>/<assistant/[one][>]/<user/Why?.>/<assistant/[two][>]/"
        )


# -- the end of a turn, and padding ----------------------------------------------------------------------------------


def test_padding_is_never_trained_and_the_end_of_turn_is_though_they_be_one_token(
    word_tokenizer: Make, chatml: str
) -> None:
    """By the collator that training uses."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    tokenizer = word_tokenizer(chatml, pad_token="<|im_end|>")
    rows = [encode(Chat(TWO_TURNS), tokenizer), encode(Chat(TWO_TURNS[:3]), tokenizer)]
    batch = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)(
        [{"input_ids": row.input_ids, "labels": row.labels} for row in rows]
    )
    for row, labels, mask in zip(rows, batch["labels"].tolist(), batch["attention_mask"].tolist(), strict=True):
        length = len(row.input_ids)
        assert labels == row.labels + [IGNORE] * (len(labels) - length)
        assert mask == [1] * length + [0] * (len(mask) - length)
    assert batch["labels"].tolist()[1].count(tokenizer.eos_token_id) == 1


def test_trained_tokens_are_counted_but_the_first_which_nothing_predicts() -> None:
    for ids, labels, count in (
        ([5, 6, 7], [5, 6, 7], 2), ([5, 6, 7], [IGNORE, 6, IGNORE], 1), ([5], [5], 0), ([], [], 0)
    ):  # fmt: skip
        assert Segment(ids, labels).trained == count
    # Those of segments add up unless they go through the model apart.
    segments = Segment([5, 6, 7], [IGNORE, 6, 7]), Segment([5, 6], [IGNORE, 6])
    assert Encoded(segments, ("chosen", "rejected")).trained == 3
    assert Encoded(segments, ("answer", "mismatched")).trained == 2
    assert segments[0].cut(2) == Segment([5, 6], [IGNORE, 6])
    assert segments[0].cut(2, 1) == Segment([6, 7], [6, 7])


# -- no mask that cannot be trusted ----------------------------------------------------------------------------------


def test_a_conversation_without_an_assistant_is_refused_unless_it_is_learnt_whole(
    word_tokenizer: Make, templates: dict[str, str]
) -> None:
    for template in ("marked", "unmarked"):
        tokenizer = word_tokenizer(templates[template])
        for loss_on in ("assistant", "last"):
            with pytest.raises(RowError, match="no assistant turn"):
                encode(Chat([system("Be brief."), user("Hi")]), tokenizer, loss_on)
        assert shown(encode(Chat([user("Hi")]), tokenizer, "all"), tokenizer) == "[<][user][/][Hi][>][/]"


@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
def test_a_template_that_leaves_out_earlier_answers_is_refused_with_what_is_lost(
    word_tokenizer: Make, unmarked: str, loss_on: Any
) -> None:
    forgets = unmarked.replace("{%- for", "{%- set last = messages|length - 1 -%}{%- for").replace(
        "message['content'] + '<|im_end|>'",
        "(message['content'] if loop.index0 == last or message['role'] == 'user' else '') + '<|im_end|>'",
    )
    messages = [user("Hi"), assistant("Hello"), user("Why?"), assistant("so")]
    with pytest.raises(RowError, match=r"does not render `messages\[1\]\.content`"):
        encode(Chat(messages), word_tokenizer(forgets), loss_on)


def test_a_template_that_renders_earlier_answers_by_the_length_of_the_conversation_is_refused(
    word_tokenizer: Make, unmarked: str
) -> None:
    counts = unmarked.replace("message['role'] + '\\n'", "message['role'] + ' ' + messages|length|string + '\\n'")
    tokenizer = word_tokenizer(counts)
    with pytest.raises(RowError, match=r"messages\[2\].*`data.loss_on: last`"):
        encode(Chat(TWO_TURNS), tokenizer)
    encoded = encode(Chat(TWO_TURNS), tokenizer, "all")
    assert encoded.labels == encoded.input_ids


def test_a_template_whose_prompt_does_not_begin_the_conversation_is_refused(
    word_tokenizer: Make, unmarked: str
) -> None:
    thinks = unmarked.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\nso'")
    with pytest.raises(RowError, match="differently"):
        encode(Chat(TWO_TURNS), word_tokenizer(thinks))


def test_an_exception_of_a_template_is_reported_for_its_row(word_tokenizer: Make, templates: dict[str, str]) -> None:
    picky = "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
    for template in ("marked", "unmarked"):
        tokenizer = word_tokenizer(picky + templates[template])
        for loss_on in ("assistant", "all"):
            with pytest.raises(RowError, match="no system role"):
                encode(Chat(TWO_TURNS), tokenizer, loss_on)
            assert encode(Chat(TWO_TURNS[1:]), tokenizer, loss_on).trained


def test_a_template_with_a_syntax_error_or_none_is_reported(word_tokenizer: Make) -> None:
    with refusal(ArtifactError, "line 1"):
        encode(Chat(TWO_TURNS), word_tokenizer("{% for message in messages %}"))
    with pytest.raises(RowError, match="chat template"):
        encode(Chat(TWO_TURNS), word_tokenizer(None))


def test_no_answer_is_lost_where_the_tokenizer_trims_its_offsets(
    byte_tokenizer: Make, templates: dict[str, str]
) -> None:
    """Such a tokenizer (the default of byte-level post-processing) has no token at a leading space, where marks are."""
    for template in ("marked", "unmarked", "plain"):
        tokenizer = byte_tokenizer(templates[template], trim_offsets=True)
        for answer in (" so it is", "  ", "\n so", "so"):
            messages = [user("Hi"), assistant(answer), user("Why?"), assistant("Because")]
            text = trained_text(encode(Chat(messages), tokenizer), tokenizer)
            assert text.replace("<|im_end|>\n", "<|im_end|>") == f"{answer}<|im_end|>Because<|im_end|>", template


# -- random conversations --------------------------------------------------------------------------------------------

_CONTENT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12) | st.sampled_from(
    ["", " ", "\n", "hello there", " the answer", "assistant\n", "\n\nuser", "{{ bos_token }}", "{% generation %}"]
)
_TURN = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), _CONTENT)
_CONVERSATION = st.builds(
    lambda first, middle, last: [first, *middle, assistant(last)],
    st.builds(system, _CONTENT) | st.builds(user, _CONTENT),
    st.lists(_TURN | st.builds(assistant, _CONTENT), max_size=5),
    _CONTENT,
)


@settings(max_examples=40)
@given(messages=_CONVERSATION)
def test_only_what_the_assistant_said_is_trained_and_marks_and_prefixes_give_the_same_mask(
    messages: list[Message], byte_tokenizer: Make, templates: dict[str, str]
) -> None:
    said = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
    for loss_on, expected in (("assistant", "".join(said)), ("last", said[-1]), ("all", None)):
        rows = {}
        for name, template in templates.items():
            tokenizer = _cached(byte_tokenizer, template)
            rows[name] = encode(Chat(messages), tokenizer, loss_on)
            assert expected in (None, trained_text(rows[name], tokenizer))
        assert rows["marked"] == rows["unmarked"]


_TOKENIZERS: dict[str, Any] = {}


def _cached(make: Make, template: str) -> Any:
    if template not in _TOKENIZERS:
        _TOKENIZERS[template] = make(template)
    return _TOKENIZERS[template]
