"""Which tokens of a conversation are the assistant's.

The rule: each assistant turn is trained once, with its end-of-turn token, and nothing else is. If the template marks
assistant turns (`{% generation %}`), the marks are used. Otherwise the conversation is rendered up to each turn, and
the mask is accepted only if the shorter rendering is a token prefix of the longer one.
"""

from __future__ import annotations

from typing import Any

from finetune.data import control
from finetune.data.examples import Chat, Message, RowError, in_common
from finetune.data.tokenizing import Asking, Piece, Span, Tokenized
from finetune.errors import FinetuneError
from finetune.model import chat_template as template


def answer_turns(messages: list[Message]) -> list[int]:
    """Indices of the assistant's messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def marks_generation(tokenizer: Any) -> bool:
    """Whether the chat template marks the assistant's tokens itself."""
    return "generation" in (tokenizer.chat_template or "") and "endgeneration" in tokenizer.chat_template


def trained_spans(example: Chat, turns: list[int], tokenizer: Any) -> Asking[tuple[list[int], list[Span]]]:
    """The tokens of the conversation, and where among them each of `turns` stands with its end-of-turn."""
    marked = marks_generation(tokenizer)
    whole = yield from rendering(example, len(example.messages), tokenizer, marks=marked)
    spans = _by_marks(example, turns, whole, tokenizer) if marked else None
    if spans is None:
        spans = yield from _by_prefixes(example, turns, whole.ids, tokenizer)
    return whole.ids, spans


def check_template(example: Chat, tokenizer: Any) -> None:
    """A template that does not know of tools would leave them out without a word."""
    text = str(tokenizer.chat_template)
    calls = any(message.get("tool_calls") for message in example.messages)
    for name, used in (("tools", example.tools), ("tool_calls", calls)):
        if used and name not in text:
            raise RowError(
                f"the chat template does not render `{name}`, so they would be lost; use a model whose template does, "
                "or set `data.chat_template` to a file with one"
            )


def rendering(
    example: Chat, messages: int, tokenizer: Any, *, prompt: bool = False, marks: bool = False
) -> Asking[Tokenized]:
    """The first so many messages in tokens; with `prompt`, up to where the assistant begins to write."""
    try:
        text, found = template.text(
            tokenizer, example.messages[:messages], tools=example.tools, prompt=prompt, marks=marks
        )
    except FinetuneError:
        raise
    except Exception as error:  # a template may raise anything of its own; the row is what it objects to
        raise RowError(f"the chat template refuses it: {error}{_remedy(str(error).lower())}") from None
    return (yield Piece(text, marks=found, escaped=example.escaped))


def _remedy(refusal: str) -> str:
    if "alternate" in refusal:
        return ". Join messages of one role that follow each other into one"
    if "system" in refusal:
        return (
            ". Put the system text at the head of the first user message, or set `data.chat_template` to one with a "
            "system role"
        )
    return ""


def _by_marks(example: Chat, turns: list[int], whole: Tokenized, tokenizer: Any) -> list[Span] | None:
    """By the template's own marks; None where they do not come through, one run of tokens for each answer."""
    answers = answer_turns(example.messages)
    if whole.runs is None or len(whole.runs) != len(answers):
        return None
    runs = dict(zip(answers, whole.runs, strict=True))
    try:
        return [_closed(whole.ids, *runs[turn], turn, tokenizer) for turn in turns]
    except RowError:
        return None  # the renderings themselves do not lie


def _by_prefixes(example: Chat, turns: list[int], ids: list[int], tokenizer: Any) -> Asking[list[Span]]:
    """By rendering the conversation up to each turn, and to its end."""
    spans = []
    for turn in turns:
        if turn == 0:
            raise RowError(
                "messages[0]: where the assistant opens, the mask needs a template with {% generation %} marks; "
                "put a user or system message first, or set `data.loss_on: all`"
            )
        before = (yield from rendering(example, turn, tokenizer, prompt=True)).ids
        end = None
        if ids[: len(before)] == before:
            end = yield from _turn_end(example, turn, ids, len(before), tokenizer)
        if end is None:
            raise RowError(
                f"messages[{turn}]: the chat template renders the conversation differently up to this turn, so its "
                "tokens cannot be told apart; use a template with {% generation %} marks, or `data.loss_on: all`"
            )
        spans.append(_closed(ids, len(before), end, turn, tokenizer))
    return spans


def _turn_end(example: Chat, turn: int, ids: list[int], start: int, tokenizer: Any) -> Asking[int | None]:
    """Where the turn that begins at `start` has ended, at the latest; None where that cannot be proven."""
    after = ids
    if turn + 1 < len(example.messages):
        after = (yield from rendering(example, turn + 1, tokenizer)).ids
    shared = in_common(ids, after)
    closing = after[shared:]
    if shared > start and not _words(closing, tokenizer) and ids[len(ids) - len(closing) :] == closing:
        return shared  # what is left is how the template closes any conversation (Phi 3)
    # Templates of reasoning models render the last answer with its thoughts and earlier ones without. The turn then
    # ends with its first end-of-turn, provided that it says what the message says.
    ends = template.end_of_turn(tokenizer)
    if ends not in ids[start:] or example.messages[turn].get("tool_calls"):
        return None
    end = ids.index(ends, start)
    rendered = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False).strip()
    content = example.messages[turn]["content"]
    text = (control.plain(content, tokenizer) if example.escaped else content).strip()
    if rendered == text or (rendered and text and (rendered.endswith(text) or text.endswith(rendered))):
        return end + 1
    return None


def _closed(ids: list[int], start: int, end: int, turn: int, tokenizer: Any) -> Span:
    """The span of a turn, up to and with the token that ends it.

    Templates put a line break after the end-of-turn; generation stops before it, so it is not learnt. Marks may leave
    the end-of-turn out, and an answer whose end is not learnt never ends.
    """
    ends = template.end_of_turn(tokenizer)
    places = [at for at in range(start, end) if ids[at] == ends]
    if len(places) > 1:
        name = tokenizer.convert_ids_to_tokens(ends)
        raise RowError(
            f"messages[{turn}].content has the end-of-turn `{name}` in it, which the template adds; remove it"
        )
    if places:
        return start, places[0] + 1
    if ids[end : end + 1] == [ends]:
        return start, end + 1
    # A call of a tool may end otherwise than an answer.
    while end > start and not _words(ids[end - 1 : end], tokenizer):
        end -= 1
        if ids[end] in template.special_ids(tokenizer):
            return start, end + 1
    raise RowError(
        f"messages[{turn}]: the chat template closes this turn with no end-of-turn token, so that a model could not "
        "learn to stop; set `data.chat_template` to a template that does"
    )


def _words(ids: list[int], tokenizer: Any) -> bool:
    """Whether there is anything but special tokens and white space."""
    special = template.special_ids(tokenizer)
    words = [token for token in ids if token not in special]
    return bool(words and tokenizer.decode(words).strip())
