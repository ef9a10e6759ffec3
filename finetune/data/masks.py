"""The label mask: which tokens of a conversation are the assistant's.

Each assistant turn is trained once, including its end-of-turn token, and nothing else is. If the template marks
assistant turns (`{% generation %}`), the marks are used. Otherwise the conversation is rendered up to each turn, and
the mask is accepted only if the shorter rendering is a token prefix of the longer one.
"""

from __future__ import annotations

from typing import Any

from finetune.data import control
from finetune.data.examples import Chat, Message, RowError, in_common
from finetune.data.tokenizing import Asking, Span, TextPart, Tokenized
from finetune.errors import FinetuneError
from finetune.model.source import chat_template as template


def answer_turns(messages: list[Message]) -> list[int]:
    """Indices of the assistant's messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def marks_generation(tokenizer: Any) -> bool:
    """Whether the chat template marks assistant turns with {% generation %}."""
    return "generation" in (tokenizer.chat_template or "") and "endgeneration" in tokenizer.chat_template


def trained_spans(example: Chat, turns: list[int], tokenizer: Any) -> Asking[tuple[list[int], list[Span]]]:
    """The tokens of the conversation, and the span of each of `turns`, including its end-of-turn token."""
    marked = marks_generation(tokenizer)
    whole = yield from rendering(example, len(example.messages), tokenizer, marks=marked)
    spans = _by_marks(example, turns, whole, tokenizer) if marked else None
    if spans is None:
        spans = yield from _by_prefixes(example, turns, whole.ids, tokenizer)
    return whole.ids, spans


def check_template(example: Chat, tokenizer: Any) -> None:
    """Raise RowError if the row has tools or tool calls and the template would silently drop them."""
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
    """The tokens of the first `messages` messages; with `prompt`, including the opening of the assistant's turn."""
    try:
        text, marked = template.text(
            tokenizer, example.messages[:messages], tools=example.tools, prompt=prompt, marks=marks
        )
    except FinetuneError:
        raise
    except Exception as error:  # a template may raise anything; it is the row that it rejects
        raise RowError(f"the chat template refuses it: {error}{_remedy(str(error).lower())}") from None
    return (yield TextPart(text, marks=marked, escaped=example.escaped))


def _remedy(refusal: str) -> str:
    if "alternate" in refusal:
        return ". Merge consecutive messages of the same role"
    if "system" in refusal:
        return (
            ". Move the system text to the start of the first user message, or set `data.chat_template` to a template "
            "with a system role"
        )
    return ""


def _by_marks(example: Chat, turns: list[int], whole: Tokenized, tokenizer: Any) -> list[Span] | None:
    """Spans by the template's marks; None unless they map to exactly one run of tokens per answer."""
    answers = answer_turns(example.messages)
    if whole.runs is None or len(whole.runs) != len(answers):
        return None
    runs = dict(zip(answers, whole.runs, strict=True))
    try:
        return [_closed(whole.ids, *runs[turn], turn, tokenizer) for turn in turns]
    except RowError:
        return None  # fall back to comparing renderings


def _by_prefixes(example: Chat, turns: list[int], ids: list[int], tokenizer: Any) -> Asking[list[Span]]:
    """Spans found by rendering the conversation up to the start and to the end of each turn."""
    spans = []
    for turn in turns:
        if turn == 0:
            raise RowError(
                "messages[0]: if the assistant speaks first, the mask needs a template with {% generation %} marks; "
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
    """An index at or after the end of the turn that begins at `start`; None if it cannot be proven."""
    after = ids
    if turn + 1 < len(example.messages):
        after = (yield from rendering(example, turn + 1, tokenizer)).ids
    shared = in_common(ids, after)
    closing = after[shared:]
    if shared > start and not _words(closing, tokenizer) and ids[len(ids) - len(closing) :] == closing:
        return shared  # the rest is how the template closes any conversation (Phi 3)
    # Templates of reasoning models render the last answer with its reasoning and earlier ones without. The turn then
    # ends with its first end-of-turn token, provided that its text is that of the message.
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
    """The span of a turn, including the token that ends it.

    Templates write a line break after the end-of-turn token; generation stops before it, so it is not trained. Marks
    may exclude the end-of-turn token, but a model not trained on it never stops.
    """
    ends = template.end_of_turn(tokenizer)
    positions = [at for at in range(start, end) if ids[at] == ends]
    if len(positions) > 1:
        name = tokenizer.convert_ids_to_tokens(ends)
        raise RowError(
            f"messages[{turn}].content contains the end-of-turn token `{name}`, which the template adds; remove it"
        )
    if positions:
        return start, positions[0] + 1
    if ids[end : end + 1] == [ends]:
        return start, end + 1
    # A tool call may end with another token than an answer.
    while end > start and not _words(ids[end - 1 : end], tokenizer):
        end -= 1
        if ids[end] in template.special_ids(tokenizer):
            return start, end + 1
    raise RowError(
        f"messages[{turn}]: the chat template closes this turn without an end-of-turn token, so a model could not "
        "learn to stop; set `data.chat_template` to a template that writes one"
    )


def _words(ids: list[int], tokenizer: Any) -> bool:
    special = template.special_ids(tokenizer)
    words = [token for token in ids if token not in special]
    return bool(words and tokenizer.decode(words).strip())
