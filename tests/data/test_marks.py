"""Facts about masks by the template's own marks, where nothing else could find them, and about tokenizing in few calls.

The template begins with as many `#` as there are messages, so that no shorter rendering is a beginning of a longer one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conversations import TWO_TURNS, assistant, shown, trained_text, user

from finetune.data.chat import encode, encode_all, heads, is_empty
from finetune.data.encoded import IGNORE, Encoded, Segment, Teacher
from finetune.data.examples import Chat, Completion, RowError, Several, Text, Tokens

Make = Callable[..., Any]

_COUNT = "{%- for message in messages -%}#{%- endfor -%}"
_MARKED = "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"

# What stands in the marks' place, and is the same mask.
_MARKS = {
    "end of turn within": _MARKED,
    "end of turn behind": "{%- generation -%}{{- message['content'] -}}{%- endgeneration -%}{{- '<|im_end|>' -}}",
    "line break within": "{%- generation -%}{{- message['content'] + '<|im_end|>\\n' -}}{%- endgeneration -%}",
    "in two": "{%- generation -%}{{- message['content'] -}}{%- endgeneration -%}"
    "{%- generation -%}{{- '<|im_end|>' -}}{%- endgeneration -%}",
    "within a word": "{%- generation -%}{{- message['content'][:3] -}}{%- endgeneration -%}"
    "{%- generation -%}{{- message['content'][3:] + '<|im_end|>' -}}{%- endgeneration -%}",
    "an empty one": "{%- generation -%}{%- endgeneration -%}" + _MARKED,
}


def counted(chatml: str, marks: str = _MARKED) -> str:
    assert _MARKED in chatml
    return _COUNT + chatml.replace(_MARKED, marks)


def test_marks_alone_give_the_mask_wherever_they_end(word_tokenizer: Make, chatml: str) -> None:
    for name, marks in _MARKS.items():
        tokenizer = word_tokenizer(counted(chatml, marks))
        breaks = "//" if name == "line break within" else "/"
        assert shown(encode(Chat(TWO_TURNS), tokenizer), tokenizer) == (
            f"#####<system/Be brief.>/<user/Hi>/<assistant/[Hello][ ][there][.][>]{breaks}"
            f"<user/Why?>/<assistant/[Because][ ][so][.][>]{breaks}"
        ), name


def test_answers_that_are_a_token_apart_stay_apart(word_tokenizer: Make) -> None:
    template = _COUNT + (
        "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}" + _MARKED + "{%- else -%}"
        "{{- ':' -}}{%- endif -%}{%- endfor -%}"
    )
    tokenizer = word_tokenizer(template)
    rows = Chat([user(""), assistant("so"), user(""), assistant("one")])
    assert shown(encode(rows, tokenizer), tokenizer) == "####:[so][>]:[one][>]"


def test_a_template_that_cannot_be_masked_without_marks_or_with_marks_around_nothing_is_refused(
    word_tokenizer: Make, chatml: str
) -> None:
    unmarked = _MARKED.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    with pytest.raises(RowError, match=r"messages\[2\]: the chat template renders the conversation differently"):
        encode(Chat(TWO_TURNS), word_tokenizer(counted(chatml, unmarked)))
    with pytest.raises(RowError, match="differently"):
        encode(Chat([user("Hi"), assistant("")]), word_tokenizer(counted(chatml, _MARKS["end of turn behind"])))


def test_a_call_ends_with_the_token_that_closes_it(word_tokenizer: Make, chatml: str) -> None:
    for behind in ("", "\\n", "\\n\\n"):
        called = (
            "{%- generation -%}{%- if message.tool_calls -%}{{- message['content'] + '<|call|>" + behind + "' -}}"
            "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}{%- endgeneration -%}"
        )
        tokenizer = word_tokenizer(counted(chatml, called), special=["<|call|>"])
        call = {**CALL, "content": "one two"}
        text = trained_text(encode(Chat([user("Hi"), call, user("so"), assistant("one")]), tokenizer), tokenizer)
        assert text == "one two<|call|>one<|im_end|>"
        breaks = word_tokenizer(counted(chatml, called.replace("<|call|>", "\\n")), special=["<|call|>"])
        with pytest.raises(RowError, match="differently"):  # nothing but line breaks: the marks are not trusted
            encode(Chat([user("Hi"), {**call, "content": "\n"}]), breaks)


def test_a_last_call_whose_mark_leaves_out_what_closes_it_learns_that(word_tokenizer: Make, chatml: str) -> None:
    behind = (
        "{%- generation -%}{{- message['content'] -}}{%- endgeneration -%}"
        "{{- '<|call|>' if message.tool_calls else '<|im_end|>' -}}"
    )
    tokenizer = word_tokenizer(chatml.replace(_MARKED, behind), special=["<|call|>"])
    assert trained_text(encode(Chat([user("Hi"), CALL]), tokenizer), tokenizer) == "so<|call|>"


def test_an_earlier_call_learns_what_closes_it_without_marks_and_with_such_as_leave_it_out(
    word_tokenizer: Make, chatml: str
) -> None:
    rows = Chat([user("Hi"), CALL, user("Why?"), CALL, user("Why?"), assistant("one")])
    for begin in ("{%- generation -%}", ""):
        for closing, learnt in (
            ("<|call|>", "<|call|>"), ("<|call|>\\n", "<|call|>"), ("\\n<|call|>", "\n<|call|>"),
            ("<|call|><|im_end|>", "<|call|><|im_end|>"),
            ("\\n<|call|>\\n<|im_end|>\\n", "\n<|call|>\n<|im_end|>"),
        ):  # fmt: skip
            behind = (
                f"{begin}{{{{- message['content'] -}}}}{begin.replace('gen', 'endgen')}"
                f"{{{{- '{closing}' if message.tool_calls else '<|im_end|>' -}}}}"
            )
            tokenizer = word_tokenizer(chatml.replace(_MARKED, behind), special=["<|call|>"])
            assert trained_text(encode(rows, tokenizer), tokenizer) == f"so{learnt}" * 2 + "one<|im_end|>", closing


_TOUCHING = _COUNT + (
    "{%- for message in messages -%}{{- '<|im_start|>' -}}{%- if message['role'] == 'assistant' -%}"
    + _MARKED + "{%- else -%}{{- message['content'] -}}{%- endif -%}{%- endfor -%}"
)  # fmt: skip


def test_what_closes_a_call_is_learnt_once_where_the_next_turn_begins_with_a_token_like_it(
    word_tokenizer: Make,
) -> None:
    words, closed = "{{- message['content'] -}}", "{{- '<|call|>' if message.tool_calls else '<|im_end|>' -}}"
    begin, end = "{%- generation -%}", "{%- endgeneration -%}"
    for is_marked, marks in ((True, begin + words + closed + end), (False, begin + words + end + closed)):
        tokenizer = word_tokenizer(_TOUCHING.replace(_MARKED, marks), special=["<|call|>"])
        for said in ("so", "\n", *([""] if is_marked else [])):  # else its marks are at no token
            rows = Chat([user("Hi"), {**CALL, "content": said}, user("Why?"), assistant("one")])
            assert trained_text(encode(rows, tokenizer), tokenizer) == f"{said}<|call|>one<|im_end|>", is_marked
            last = Chat(rows.messages[:2])
            assert trained_text(encode(last, tokenizer), tokenizer) == f"{said}<|call|>", is_marked


def test_a_mark_at_no_token_is_not_trusted_and_one_that_ends_at_none_is_closed_by_its_end(
    byte_tokenizer: Make, chatml: str
) -> None:
    """The offsets of some tokenizers leave white space out."""
    within = counted(chatml, _MARKS["line break within"])
    tokenizer = byte_tokenizer(within, trim_offsets=True)
    assert trained_text(encode(Chat([user("Hi"), assistant("so")]), tokenizer), tokenizer) == "so<|im_end|>"
    with pytest.raises(RowError, match="differently"):
        encode(Chat([user("Hi"), assistant(" so")]), tokenizer)
    sound = byte_tokenizer(within)
    assert trained_text(encode(Chat([user("Hi"), assistant(" so")]), sound), sound) == " so<|im_end|>"


# -- without marks: where a turn has ended ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def closed(chatml: str) -> str:
    """ChatML without marks that closes any conversation with a token of its own, and renders calls."""
    unmarked = chatml.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    ends = "{%- if not add_generation_prompt -%}{{- '<|pad|>' -}}{%- endif -%}"
    words = "message['content'] + ('#' if message.tool_calls else '') + '<|im_end|>'"
    return unmarked.replace("message['content'] + '<|im_end|>'", words) + ends


# A call with nothing but its content to render.
CALL = {**assistant("so"), "tool_calls": [{"type": "function", "function": {"name": "", "arguments": {}}}]}


def test_a_call_before_the_end_is_trained_as_a_closed_conversation_renders_it(
    word_tokenizer: Make, closed: str
) -> None:
    rows = Chat([user("Hi"), CALL, user("Why?"), assistant("one")])
    forgets = closed.replace("'#' if message.tool_calls", "'#' if message.tool_calls and loop.last")
    for template, text in ((closed, "so#<|im_end|>one<|im_end|>"), (forgets, "so<|im_end|>one<|im_end|>")):
        tokenizer = word_tokenizer(template, pad_token="<unk>")
        assert trained_text(encode(rows, tokenizer), tokenizer) == text
    rows = Chat([user("Hi"), CALL, user(""), assistant("one")])
    assert trained_text(encode(rows, tokenizer), tokenizer) == text


def test_an_answer_that_nothing_ends_is_refused_though_the_questions_have_ends(
    word_tokenizer: Make, chatml: str
) -> None:
    endless = chatml.replace(_MARKED, "{{- message['content'] + ('#' if loop.last else '') -}}")
    for last in (user("Why?"), assistant("one")):
        with pytest.raises(RowError, match=r"messages\[1\]"):
            encode(Chat([user("Hi"), assistant("so"), last]), word_tokenizer(endless))
    ended = "message['content'] + ('<|im_end|>' if messages|length == 2 else '#' if loop.last else '')"
    at_times = chatml.replace(_MARKED, "{{- " + ended + " -}}")
    with pytest.raises(RowError, match=r"messages\[1\].*differently"):
        encode(Chat([user("Hi"), assistant("so"), assistant("one")]), word_tokenizer(at_times))


def test_an_earlier_answer_that_is_rendered_differently_at_the_end_is_located_by_its_words(
    word_tokenizer: Make, chatml: str
) -> None:
    rows = Chat([user("Hi"), assistant("one . two"), user("Why?"), assistant("so")])
    for ends, text in (
        ("('#' if loop.last else '') + '<|im_end|>'", "one . two<|im_end|>so#<|im_end|>"),
        ("('#<|im_end|>' if loop.last else '<|pad|>')", "one . twoso#<|im_end|>"),  # trained without another token
    ):
        template = chatml.replace(_MARKED, f"{{{{- message['content'] + {ends} -}}}}")
        tokenizer = word_tokenizer(template, pad_token="<unk>")
        assert trained_text(encode(rows, tokenizer), tokenizer) == text
    template = chatml.replace(_MARKED, "{{- '<|pad|>' + message['content'] + ('#' if loop.last else '') -}}<|im_end|>")
    tokenizer = word_tokenizer(template, pad_token="<unk>")  # which writes a token before the words, as gpt-oss's does
    assert trained_text(encode(rows, tokenizer), tokenizer) == "<|pad|>one . two<|im_end|><|pad|>so#<|im_end|>"


def test_an_earlier_answer_with_a_word_that_the_tokenizer_does_not_know_is_trained(
    word_tokenizer: Make, closed: str
) -> None:
    """Its tokens do not spell its words, but all that follows it is what closes any conversation."""
    tokenizer = word_tokenizer(closed)
    rows = Chat([user("Hi"), assistant("unheard"), user("Why?"), assistant("one")])
    row = "<user/Hi>/<assistant/[<unk>][>]/<user/Why?>/<assistant/[one][>]/_"
    assert shown(encode(rows, tokenizer), tokenizer) == row


def test_running_out_of_memory_in_the_tokenizer_is_not_blamed_on_a_row(
    word_tokenizer: Make, chatml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: object, **options: object) -> None:
        raise MemoryError

    tokenizer = word_tokenizer(chatml)
    monkeypatch.setattr(type(tokenizer), "__call__", exhausted)
    with pytest.raises(MemoryError):
        encode_all([Text("so"), Text("one")], tokenizer)


BARE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['content'] -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>' -}}{%- endif -%}"
)


def test_no_other_special_token_is_taken_for_the_end_of_a_turn(word_tokenizer: Make) -> None:
    """Neither one amid the answer, nor the one before it."""
    tokenizer = word_tokenizer(BARE, pad_token="<unk>")
    refused = r"messages\[1\]: the chat template closes this turn without an end-of-turn token"
    for answer in ("one<|pad|>two", "one<|pad|>two\n", "\n", "one"):
        with pytest.raises(RowError, match=refused):
            encode(Chat([user("Hi"), assistant(answer)]), tokenizer, control_tokens="parse")


# -- what is tokenized together --------------------------------------------------------------------------------------


def test_special_tokens_go_around_texts_of_their_own_and_nothing_else(word_tokenizer: Make, chatml: str) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer(chatml)
    begin = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[begin])
    rows = encode_all([Completion("Why?", "so"), Text("so so"), Chat([user("Hi"), assistant("so")])], tokenizer)
    assert [shown(row, tokenizer) for row in rows if isinstance(row, Encoded)] == [
        "<Why?[so][>]",
        "[<][so][ ][so][>]",
        "<user/Hi>/<assistant/[so][>]/",
    ]


def test_a_text_that_the_tokenizer_refuses_costs_its_own_row_alone(chatml: str) -> None:
    """As one without an unknown token does at a word that it does not know."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|im_start|>", "<|im_end|>", "user", "assistant", "\n", "Hi", "so", "Because"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="no such"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\w+|[^\s\w]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(words[:2])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = chatml
    answers = ["so", "unheard", "Because"]
    found = encode_all([Chat([user("Hi"), assistant(answer)]) for answer in answers], tokenizer)
    assert isinstance(found[1], RowError)
    others = encode_all([Text("so unheard"), Completion("Hi", "so"), Completion("Hi", "unheard")], tokenizer)
    assert [type(row) for row in others] == [RowError, Encoded, RowError]
    assert all("the tokenizer rejects it" in str(row) for row in (found[1], others[0], others[2]))
    assert [trained_text(row, tokenizer) for row in (found[0], found[2])] == ["so<|im_end|>", "Because<|im_end|>"]


def test_a_tokenizer_written_in_python_knows_no_offsets_and_masks_all_the_same(chatml: str) -> None:
    from transformers import PythonBackend

    class Letters(PythonBackend):
        def __init__(self, **tokens: Any) -> None:
            self.letters = {chr(code): code - 10 for code in range(10, 127)}
            super().__init__(**tokens)

        @property
        def vocab_size(self) -> int:
            return len(self.letters)

        def get_vocab(self) -> dict[str, int]:
            return {**self.letters, **self.added_tokens_encoder}

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return self.letters[token]

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index + 10)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    tokenizer = Letters(eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = chatml
    assert not tokenizer.is_fast
    row = encode(Chat([user("Hi"), assistant("so it is"), user("Why"), assistant("so")]), tokenizer)
    text = "".join(tokenizer.convert_ids_to_tokens([label for label in row.labels if label != IGNORE]))
    assert text == "so it is<|im_end|>so<|im_end|>"


# -- heads, blanks and ids -------------------------------------------------------------------------------------------


def test_the_head_of_a_row_is_its_system_message(word_tokenizer: Make, chatml: str) -> None:
    examples = [Chat(TWO_TURNS), Chat(TWO_TURNS[1:]), Text("so"), Completion("Why?", "so")]

    def of_system(template: str) -> list[int]:
        tokenizer = word_tokenizer(template)
        rows = [row.segments[0] for row in encode_all(examples, tokenizer) if isinstance(row, Encoded)]
        found = heads(list(zip(examples, rows, strict=True)), tokenizer)
        assert {(head.bos, head.tools) for head in found} == {(0, (0, 0))}
        return [head.system for head in found]

    assert of_system(chatml) == [len(["<", "system", "\n", "Be", " ", "brief", ".", ">", "\n"]), 0, 0, 0]
    assert of_system(counted(chatml)) == [1, 0, 0, 0], "one `#` is in common"
    other = chatml.replace("{%- for", "{%- if messages|length == 1 -%}:{%- endif -%}{%- for", 1)
    assert of_system(other) == [0, 0, 0, 0], "nothing is in common"
    refuses = "{%- if messages|length == 1 -%}{{ raise_exception('no question') }}{%- endif -%}" + chatml
    assert of_system(refuses) == [0, 0, 0, 0]


def test_an_answer_that_trains_no_token_counts_as_empty() -> None:
    for example, loss_on, empty in [
        (Completion("Why?", "so"), "assistant", False), (Completion("Why?", " \n"), "assistant", True),
        (Completion("Why?", " \n"), "all", False), (Completion(" ", " \n"), "all", True),
        (Completion(" ", "so"), "all", False), (Text(" "), "assistant", True), (Text("so"), "assistant", False),
        (Tokens([1]), "assistant", False), (Chat([user("Hi"), assistant(" ")]), "assistant", True),
        (Chat([user("Hi"), assistant(" ")]), "all", False),
        (Chat([user("Hi"), assistant(" "), user("Why?"), assistant("so")]), "assistant", False),
        (Several({"chosen": Completion("Why?", "so"), "rejected": Completion("Why?", " ")}), "assistant", True),
        (Several({"chosen": Completion("Why?", "so"), "rejected": Completion("Why?", "one")}), "assistant", False),
    ]:  # fmt: skip
        assert is_empty(example, loss_on) is empty, example


def test_ids_from_the_first_to_the_last_of_the_vocabulary_are_taken_and_no_other(word_tokenizer: Make) -> None:
    tokenizer = word_tokenizer(None)
    last = len(tokenizer) - 1
    assert encode(Tokens([0, last]), tokenizer).segments == (Segment([0, last], [0, last]),)
    for wrong in (-1, last + 1):
        with pytest.raises(RowError, match=rf"`input_ids\[1\]` is {wrong}, but the tokenizer has"):
            encode(Tokens([0, wrong]), tokenizer)

    def taught(token: int) -> Tokens:
        return Tokens([5, 6], teacher=Teacher(np.array([[0], [token]], np.int32), np.zeros((2, 1), np.float32)))

    [segment] = encode(taught(last), tokenizer).segments
    assert segment.teacher is not None
    assert segment.teacher.ids.tolist() == [[0], [last]]
    with pytest.raises(RowError, match=f"the teacher has token {last + 1}, but the tokenizer has"):
        encode(taught(last + 1), tokenizer)


# -- several segments ------------------------------------------------------------------------------------------------


def test_each_answer_to_a_prompt_is_masked_and_the_prompt_is_not_trained_with_each(word_tokenizer: Make) -> None:
    tokenizer = word_tokenizer(None)
    pair = Several({"chosen": Completion("Why?", "so"), "rejected": Completion("Why?", "one")}, {"margin": 2.0})
    row = encode(pair, tokenizer)
    assert [shown(segment, tokenizer) for segment in row.segments] == ["Why?[so][>]", "Why?[one][>]"]
    assert (row.names, row.values) == (("chosen", "rejected"), {"margin": 2.0})
    with pytest.raises(RowError, match=r"`data\.loss_on: all` would train the prompt again"):
        encode(pair, tokenizer, "all")
    assert shown(encode(Several({"answer": Completion("Why?", "so")}), tokenizer, "all"), tokenizer) == (
        "[Why][?][so][>]"
    )
