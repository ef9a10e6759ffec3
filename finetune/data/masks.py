"""The label mask: which tokens of a conversation are the assistant's.

Each assistant turn is trained once, including its end-of-turn token, and nothing else is. If the template marks
assistant turns (`{% generation %}`), the marks are used. Otherwise, or if the marks do not map to tokens, the
conversation is rendered up to the start and to the end of each turn. Usually both renderings are token prefixes of the
whole. Where one is not, the turn is found by, in this order:

    its start   the tokens before a thought that the prompt alone opens (`_start`)
    its end     a closing without words that also ends the whole conversation (`_turn_end`)
                the first end of a turn, if the decoded text before it is the message's (`_turn_end`)
                the places of texts: the first end of a turn after those of this one (`_end_in_whole`)

A turn for which none of these holds is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from finetune.data import control, images, outline
from finetune.data.examples import Chat, Message, RowError, in_common
from finetune.data.tokenizing import Asking, CharSpan, TextPart, Tokenized, TokenSpan
from finetune.errors import FinetuneError
from finetune.model.source import chat_template as template

# A thought that a template opens in the prompt, or opens and closes; and one without content, in any answer.
_OPENED = re.compile(r"\s*<think>\s*(</think>\s*)?")
_EMPTY = re.compile(r"\s*<think>\s*</think>\n*")
_CLOSED = (
    "messages[{}] has a thought, but the chat template's prompt ends with an empty one; remove the thought, or what "
    "turns thoughts off in `data.template_arguments`"
)
# Most tokens of either, where the tags are no tokens of their own.
_THOUGHT_TOKENS = 16

THOUGHTS = frozenset(outline.THOUGHTS)


class _Rendering(NamedTuple):
    """The text of a whole conversation, and where its leaves are in it, if that is known."""

    text: str
    places: list[outline.Place] | None


class Mask(NamedTuple):
    """The tokens of a conversation, the spans to be trained, and whether turns are not trained for lack of a thought.

    Templates of reasoning models leave out the thoughts of earlier turns, as inference does. Such a turn is not
    trained, because a model would learn to answer without the thought that led to the answer.
    """

    ids: list[int]
    spans: list[TokenSpan]
    lost_thoughts: bool


def answer_turns(messages: list[Message]) -> list[int]:
    """Indices of the assistant's messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def marks_generation(tokenizer: Any) -> bool:
    """Whether the chat template marks assistant turns with {% generation %}."""
    return "generation" in (tokenizer.chat_template or "") and "endgeneration" in tokenizer.chat_template


def mask(example: Chat, turns: list[int], tokenizer: Any) -> Asking[Mask]:
    """The tokens of the conversation, and the span of each of `turns`, including its end-of-turn token.

    A span does not include an empty thought at its start, which templates write for an answer without one.
    """
    has_marks = marks_generation(tokenizer)
    text, marks = _text(example, len(example.messages), tokenizer, marks=has_marks)
    found = outline.check(example, text, tokenizer, marks=has_marks)
    _refuse_other_prompt(example, turns, found, tokenizer)
    filled = [mark for mark in marks if mark[0] < mark[1]]
    answers, own_text = answer_turns(example.messages), marks
    if found.outline is not None and len(filled) == len(answers):
        # The template's marks may include what its prompt writes of a turn.
        headers = [found.outline.headers.get(turn, "") for turn in answers]
        own_text = [
            (start + len(header) * text.startswith(header, start), end)
            for header, (start, end) in zip(headers, filled, strict=True)
        ]
    whole = yield _part(example, len(example.messages), text, own_text)
    if (last := example.messages[-1])["role"] == "assistant":
        end = template.unwritten_ends(tokenizer)[bool(last.get("tool_calls"))]
        whole = whole._replace(ids=whole.ids + end)
    thoughtful = [turn for turn in turns if turn not in found.without_thought]
    trained = _by_marks(example, thoughtful, whole, tokenizer) if has_marks else None
    if trained is None:
        trained = yield from _by_prefixes(example, thoughtful, whole.ids, _Rendering(text, found.places), tokenizer)
    if re.search("think|thought|analysis", str(tokenizer.chat_template)):
        trained = [
            (_after_empty_thought(example, turn, whole.ids, start, end, tokenizer), end)
            for turn, (start, end) in zip(thoughtful, trained, strict=True)
            if _thought(example, turn, tokenizer) in _letters(tokenizer.decode(whole.ids[start:end]))
        ]
    return Mask(whole.ids, trained, lost_thoughts=len(trained) < len(turns))


def _refuse_other_prompt(example: Chat, turns: list[int], found: outline.Found, tokenizer: Any) -> None:
    """Raise RowError for an answer whose prompt opens a thought that its conversation does not have, or closes one."""
    last = answer_turns(example.messages)[-1]
    for turn, beyond in found.outline.beyond.items() if found.outline else ():
        if turn == last and turn in turns and _OPENED.fullmatch(beyond) and "</think>" not in beyond:
            raise RowError(
                f"messages[{last}]: the chat template's prompt opens a thought that its conversations do not have, so "
                "the answer would be trained where no prompt ends; "
                + outline.thought_remedy(tokenizer, is_missing=True)
            )
        if turn in turns and "</think>" in beyond and _thought(example, turn, tokenizer):
            raise RowError(_CLOSED.format(turn))


def _thought(example: Chat, turn: int, tokenizer: Any) -> str:
    """The letters of a message's thought, in a field that the template reads or in its content; empty without one."""
    message, chat_template = example.messages[turn], str(tokenizer.chat_template)
    inline, closed, _ = message["content"].rpartition("</think>")
    read = any(name in chat_template for name in THOUGHTS)  # transformers passes each of them under all names
    thoughts = [str(message.get(name) or "") for name in THOUGHTS if read]
    thought = max([*thoughts, inline.rpartition("<think>")[2] if closed else ""], key=len)
    return _letters(control.plain(thought, tokenizer) if example.escaped else thought)


def _letters(text: str) -> str:
    """The text without white space, which templates trim and some tokenizers change."""
    return "".join(text.split())


def _after_empty_thought(example: Chat, turn: int, ids: list[int], start: int, end: int, tokenizer: Any) -> int:
    """The start of a turn's text after an empty thought, part of which may be in the prompt.

    Raises RowError for an answer whose thought comes after an empty one, where no prompt lets the model write it.
    """
    before = max(0, start - _THOUGHT_TOKENS)
    if not _EMPTY.search(tokenizer.decode(ids[before : start + _THOUGHT_TOKENS])):
        return start
    for first in range(start, before, -1):
        for after in range(min(end, start + _THOUGHT_TOKENS), start, -1):
            if _EMPTY.fullmatch(tokenizer.decode(ids[first:after])):
                if _thought(example, turn, tokenizer):
                    raise RowError(
                        f"messages[{turn}].content has a thought, which the chat template renders after an empty one; "
                        "write it in `reasoning_content`"
                    )
                return after
    return start


def rendering(
    example: Chat, messages: int, tokenizer: Any, *, prompt: bool = False, checked: bool = False
) -> Asking[Tokenized]:
    """The tokens of the first `messages` messages; with `prompt`, including the opening of the assistant's turn.

    If `checked`, raises RowError for a rendering that lacks a part of the row.
    """
    text, _ = _text(example, messages, tokenizer, prompt=prompt)
    if checked:
        outline.check(example, text, tokenizer)
    return (yield _part(example, messages, text, []))


def _text(
    example: Chat, messages: int, tokenizer: Any, *, prompt: bool = False, marks: bool = False
) -> tuple[str, list[CharSpan]]:
    try:
        return template.text(tokenizer, example.messages[:messages], tools=example.tools, prompt=prompt, marks=marks)
    except FinetuneError:
        raise
    except Exception as error:  # a template may raise anything; it is the row that it rejects
        refusal, remedy = str(error).lower(), ""
        calls = any(message.get("tool_calls") for message in example.messages)
        for name, used in (("tools", example.tools), ("tool_calls", calls)):
            if used and name not in str(tokenizer.chat_template):
                raise RowError(outline.refusal(name)) from None
        if "alternate" in refusal:
            remedy = ". Merge consecutive messages of the same role"
        elif "system" in refusal:
            remedy = (
                ". Move the system text to the start of the first user message, or set `data.chat_template` to a "
                "template with a system role"
            )
        elif calls and "concatenate str" in refusal:
            remedy = (
                ". It takes the arguments of a call for text, though templates get an object; set "
                "`data.chat_template` to one that renders the arguments with `tojson`"
            )
        elif example.tools and ("no attribute" in refusal or "undefined" in refusal):
            remedy = ". It may read a field that a tool of the row lacks, such as `description` or `parameters`"
        raise RowError(f"the chat template refuses it: {error}{remedy}") from None


def _part(example: Chat, messages: int, text: str, marks: list[CharSpan]) -> TextPart:
    if shown := images.shown_in(example.messages[:messages]):
        text, marks = images.spelled_out(text, marks, example.images[:shown])
    return TextPart(text, marks=marks, escaped=example.escaped)


def _by_marks(example: Chat, turns: list[int], whole: Tokenized, tokenizer: Any) -> list[TokenSpan] | None:
    """Spans by the template's marks; None unless they map to exactly one run of tokens per answer."""
    answers = answer_turns(example.messages)
    if whole.runs is None or len(whole.runs) != len(answers):
        return None
    runs = dict(zip(answers, whole.runs, strict=True))
    special, ends = template.special_ids(tokenizer), template.end_of_turn(tokenizer)
    for turn in turns:
        if not example.messages[turn].get("tool_calls"):
            continue
        # The marks of a call may exclude what closes it: the end-of-turn token (which `_closed` includes), or another
        # one in its place, if no word comes before.
        start, end = runs[turn]
        closing = [at for at in _wordless(whole.ids, range(end, len(whole.ids)), tokenizer) if whole.ids[at] in special]
        within = _wordless(whole.ids, range(end - 1, start - 1, -1), tokenizer)
        if of_turn := [at for at in closing if whole.ids[at] == ends]:
            runs[turn] = start, of_turn[0]
        elif closing and not any(whole.ids[at] in special for at in within):
            runs[turn] = start, closing[0] + 1
    try:
        return [_closed(whole.ids, *runs[turn], turn, tokenizer) for turn in turns]
    except RowError:
        return None  # fall back to comparing renderings


def _by_prefixes(
    example: Chat, turns: list[int], ids: list[int], rendered: _Rendering, tokenizer: Any
) -> Asking[list[TokenSpan]]:
    """Spans found by rendering the conversation up to the start and to the end of each turn."""
    spans = []
    for turn in turns:
        if turn == 0:
            raise RowError(
                "messages[0]: if the assistant speaks first, the mask needs a template with {% generation %} marks; "
                "put a user or system message first, or write `train: false` in this one"
            )
        before = (yield from rendering(example, turn, tokenizer, prompt=True)).ids
        end, start = None, _start(ids, before, tokenizer)
        if start is not None:
            end = yield from _turn_end(example, turn, ids, start, tokenizer)
            if end is None:
                end = _end_in_whole(rendered, turn, ids, start, tokenizer)
            # A prompt that ends with a closed thought would not let the model write its own.
            thought = _thought(example, turn, tokenizer)
            closed = "</think>" in tokenizer.decode(before[start:])
            if thought and closed and thought in _letters(tokenizer.decode(ids[start:end])):
                raise RowError(_CLOSED.format(turn))
        if start is None or end is None:
            raise RowError(
                f"messages[{turn}]: the chat template renders the conversation differently up to this turn, so its "
                "tokens cannot be told apart; use a template with {% generation %} marks"
                + ", or train the last answer only (`data.loss_on: last`)"
                * (turn != answer_turns(example.messages)[-1])
            )
        spans.append(_closed(ids, start, end, turn, tokenizer))
    return spans


def _start(ids: list[int], before: list[int], tokenizer: Any) -> int | None:
    """Where the turn begins whose prompt is `before`; None if the conversation has another prompt.

    A template may open a thought in the prompt, and leave it out or fill it in a conversation.
    """
    shared = in_common(ids, before)
    if shared == len(before):
        return shared
    for start in range(shared, max(0, shared - _THOUGHT_TOKENS), -1):
        if _OPENED.fullmatch(tokenizer.decode(before[start:])):
            return start
    return None


def _turn_end(example: Chat, turn: int, ids: list[int], start: int, tokenizer: Any) -> Asking[int | None]:
    """An index at or after the end of the turn that begins at `start`; None if it cannot be proven."""
    after = (yield from rendering(example, turn + 1, tokenizer)).ids if turn + 1 < len(example.messages) else ids
    shared = in_common(ids, after)
    closing = after[shared:]
    if shared > start and not _words(closing, tokenizer) and ids[len(ids) - len(closing) :] == closing:
        return shared  # usually nothing is left; or the rest is how the template closes any conversation (Phi 3)
    # Templates of reasoning models render the last answer with its reasoning and earlier ones without. The turn then
    # ends with its first end-of-turn token, provided that its text is that of the message.
    ends = template.end_of_turn(tokenizer)
    if ends not in ids[start:] or example.messages[turn].get("tool_calls"):
        return None
    content = example.messages[turn]["content"]
    text = (control.plain(content, tokenizer) if example.escaped else content).strip()
    special = template.special_ids(tokenizer)
    for end in (at for at in range(start, ids.index(ends, start) + 1) if ids[at] in special):
        rendered = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False).strip()
        if rendered == text or (rendered and text and (rendered.endswith(text) or text.endswith(rendered))):
            return end + (ids[end] == ends)
    return None


def _end_in_whole(rendered: _Rendering, turn: int, ids: list[int], start: int, tokenizer: Any) -> int | None:
    """The end of a turn by the places of all texts: after the first end-of-turn token that follows those of the turn.

    Templates of reasoning models render a call otherwise once its result follows. None if other texts come first.
    """
    ends = template.end_of_turn(tokenizer)
    if ends is None or not rendered.places:
        return None
    first = next((at for at, place in enumerate(rendered.places) if place.message == turn and not place.again), None)
    if first is None:
        return None
    rest = rendered.places[first:]
    own = list(itertools.takewhile(lambda place: place.message == turn, rest))
    if late := [place for place in rest[len(own) :] if place.message == turn and not place.again]:
        between = next(place.message for place in rest[len(own) :] if place.start < late[0].start)
        raise RowError(
            f"messages[{turn}]: the chat template renders a part of it after messages[{between}], so it cannot be "
            "trained as one answer; write that part, such as the content beside a call, in a message of its own"
        )
    name = tokenizer.convert_ids_to_tokens(ends)
    after = rendered.text.find(name, own[-1].end, rest[len(own)].start if len(own) < len(rest) else None)
    positions = [at for at, token in enumerate(ids) if token == ends]
    if after < 0 or len(positions) < (number := rendered.text.count(name, 0, after)) + 1:
        return None
    end = positions[number] + 1
    decoded = _letters(tokenizer.decode(ids[start:end]))
    return end if end > start and _letters(rendered.text[own[0].start : after]) in decoded else None


def _closed(ids: list[int], start: int, end: int, turn: int, tokenizer: Any) -> TokenSpan:
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
    if ids[end : end + 1] and ids[end] in (ends, *template.unwritten_ends(tokenizer)[1]):
        return start, end + 1
    # A tool call may end with another token than an answer.
    for at in _wordless(ids, range(end - 1, start - 1, -1), tokenizer):
        if ids[at] in template.special_ids(tokenizer):
            return start, at + 1
    if ids[end : end + 1] and ids[end] in template.special_ids(tokenizer) and ends in ids[end:]:
        return start, end  # an earlier turn, closed by a token that does not end an answer (gpt-oss)
    raise RowError(
        f"messages[{turn}]: the chat template closes this turn without an end-of-turn token, so a model could not "
        "learn to stop; set `data.chat_template` to a template that writes one"
    )


def _wordless(ids: list[int], indices: range, tokenizer: Any) -> Iterator[int]:
    """Those of `indices` before the first token with words."""
    return itertools.takewhile(lambda at: not _words([ids[at]], tokenizer), indices)


def _words(ids: list[int], tokenizer: Any) -> bool:
    special = template.special_ids(tokenizer)
    words = [token for token in ids if token not in special]
    return bool(words and tokenizer.decode(words).strip())
