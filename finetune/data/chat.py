"""Turns the content of a row into tokens and labels. Tokens with label -100 (`IGNORE`) are not trained.

A row is encoded by a generator that yields each text to be tokenized; see tokenizing.py.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from finetune.data import control, masks
from finetune.data.encoded import IGNORE, Encoded, Head, Segment
from finetune.data.examples import (
    Chat,
    Completion,
    Content,
    Example,
    RowError,
    Several,
    Text,
    Tokens,
    in_common,
    media_in,
    parts,
    text_of,
)
from finetune.data.tokenizing import Asking, RowResult, TextPart, answered
from finetune.model.source import chat_template

LossOn = Literal["assistant", "last", "all", "end"]
ControlTokens = Literal["text", "parse"]


def encode(
    content: Content, tokenizer: Any, loss_on: LossOn = "assistant", control_tokens: ControlTokens = "text"
) -> Encoded:
    """Tokens and labels of a row. Raises RowError if no trustworthy mask can be found."""
    return _alone(_encoding(content, tokenizer, loss_on, control_tokens), tokenizer)


def encode_all(
    contents: Sequence[Content], tokenizer: Any, loss_on: LossOn = "assistant", control_tokens: ControlTokens = "text"
) -> list[Encoded | RowError]:
    """Tokens and labels of each row, or the error that `encode` would raise for it."""
    return answered([_encoding(content, tokenizer, loss_on, control_tokens) for content in contents], tokenizer)


def prompt_ids(example: Example, tokenizer: Any, control_tokens: ControlTokens = "text") -> list[int]:
    """Prompt tokens for generation, as in training: all up to what the assistant or the completion would write."""
    return _alone(_prompt(example, tokenizer, control_tokens), tokenizer)


def _alone(work: Asking[RowResult], tokenizer: Any) -> RowResult:
    [result] = answered([work], tokenizer)
    if isinstance(result, RowError):
        raise result
    return result


def heads(
    rows: Sequence[tuple[Example, Segment]], tokenizer: Any, control_tokens: ControlTokens = "text"
) -> list[Head]:
    """What each part of a row that is cut keeps of its beginning.

    The system message is none of it if the template renders it inside the first user message.
    """
    asked = [_head(example, segment.input_ids, tokenizer, control_tokens) for example, segment in rows]
    return [Head() if isinstance(head, RowError) else head for head in answered(asked, tokenizer)]


def _head(example: Example, ids: list[int], tokenizer: Any, control_tokens: ControlTokens) -> Asking[Head]:
    before, bos, system, tools = control.around(tokenizer).before, tokenizer.bos_token_id, 0, (0, 0)
    first = len(before) if before and ids[: len(before)] == before else int(ids[:1] == [bos] and bos not in ids[1:])
    if isinstance(example, Chat):
        example = _escaped(example, tokenizer, control_tokens)
        if example.messages[0]["role"] == "system":
            with contextlib.suppress(RowError):
                system = in_common(ids, (yield from masks.rendering(example, 1, tokenizer)).ids)
        if example.tools:
            tools = yield from _tools(example, ids, tokenizer)
    return Head(first, system, tools)


def _tools(example: Chat, ids: list[int], tokenizer: Any) -> Asking[tuple[int, int]]:
    """From where to where the definitions of tools are in a conversation of these tokens, with the turn they are in.

    They are what a rendering without them lacks; all of it, if the template refuses to make one.
    """
    try:
        whole = (yield from masks.rendering(example, len(example.messages), tokenizer)).ids
        without = (yield from masks.rendering(replace(example, tools=None), len(example.messages), tokenizer)).ids
    except RowError:
        return 0, len(ids)
    after = in_common(whole[::-1], without[::-1])
    start, end = min(in_common(whole, without), len(without) - after), len(whole) - after
    ends = chat_template.end_of_turn(tokenizer)
    if ends not in whole[:start]:
        start = 0
    if whole[end : end + 1] == [ends]:
        end += 1
        while end < len(whole) and not tokenizer.decode([whole[end]]).strip():
            end += 1
    return start, end


def unused(example: Chat, tokenizer: Any) -> list[str]:
    """Fields of its messages that the chat template does not use."""
    names = {name for message in example.messages for name in message} - {"role", "content", "tool_calls"}
    read = _names_in(str(tokenizer.chat_template))
    if read & masks.THOUGHTS:  # transformers passes a thought under all of these names
        read |= masks.THOUGHTS
    return sorted(names - read)


@functools.lru_cache(maxsize=8)
def _names_in(chat_template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", chat_template))


def is_empty(content: Content, loss_on: LossOn = "assistant") -> bool:
    """Whether everything to be trained is blank in a segment: answers of white space without a tool call."""
    for example in parts(content):
        trained: Sequence[Any] = ()
        match example:
            case Chat(messages):
                match loss_on:
                    case "all":
                        turns = [*range(len(messages))]
                    case "end":
                        turns = [turn for turn in range(len(messages)) if turn not in example.context]
                    case _:
                        turns = trained_turns(example, loss_on)
                trained = [text_of(messages[turn]).strip() or messages[turn].get("tool_calls") for turn in turns]
            case Completion(prompt, completion):
                trained = [completion.strip(), loss_on == "all" and prompt.strip()]
            case Text(text):
                trained = [text.strip()]
        if trained and not any(trained):
            return True
    return False


def trained_turns(example: Chat, loss_on: LossOn) -> list[int]:
    """Indices of the messages that are trained, unless `loss_on` is `all` or `end`."""
    turns = [turn for turn in masks.answer_turns(example.messages) if turn not in example.context]
    return turns[-1:] if loss_on == "last" else turns


Readable = TypeVar("Readable", bound=Example)


def _escaped(example: Readable, tokenizer: Any, control_tokens: ControlTokens) -> Readable:
    """The example, escaped unless control tokens in its text are to be parsed."""
    return control.escaped(example, tokenizer) if control_tokens == "text" else example


def _encoding(content: Content, tokenizer: Any, loss_on: LossOn, control_tokens: ControlTokens) -> Asking[Encoded]:
    segments = []
    if loss_on == "all" and isinstance(content, Several) and len(content.segments) > 1:
        raise RowError(
            "`data.loss_on: all` would train the prompt again with each of the answers; set `data.loss_on: assistant`"
        )
    for example in parts(content):
        segments.append((yield from _segment(example, tokenizer, loss_on, control_tokens)))
    if isinstance(content, Several):
        return Encoded(tuple(segments), tuple(content.segments), content.values)
    return Encoded(tuple(segments))


def _segment(example: Example, tokenizer: Any, loss_on: LossOn, control_tokens: ControlTokens) -> Asking[Segment]:
    example = _escaped(example, tokenizer, control_tokens)
    if loss_on == "end":
        return (yield from _scored(example, tokenizer))
    match example:
        case Chat(messages, escaped=escaped):
            lost_thoughts = False
            if loss_on == "all":
                ids = (yield from masks.rendering(example, len(messages), tokenizer, checked=True)).ids
                labels = list(ids)
            elif not masks.answer_turns(messages):
                raise RowError("the conversation has no assistant turn, so there is nothing to train")
            else:
                turns = trained_turns(example, loss_on)
                ids, spans, lost_thoughts = yield from masks.mask(example, turns, tokenizer)
                labels = [IGNORE] * len(ids)
                for start, end in spans:
                    labels[start:end] = ids[start:end]
            return Segment(ids, labels, escaped=escaped, lost_thoughts=lost_thoughts, media=example.images)
        case Completion(text, answer, escaped):
            # Prompt and completion are tokenized separately, as in generation, so no token spans the boundary.
            prompt = yield from _text(text, escaped, tokenizer, continued=True)
            completion = (yield TextPart(answer, escaped=escaped)).ids
            completion, end = _with_end(completion, prompt + completion, tokenizer)
            ids = prompt + completion
            labels = [IGNORE] * len(prompt) + completion[:end] + [IGNORE] * (len(completion) - end)
            return Segment(ids, list(ids) if loss_on == "all" else labels, escaped=escaped)
        case Tokens():
            return _tokens(example, tokenizer)
        case Text(text, escaped):
            ids = yield from _text(text, escaped, tokenizer)
            ids, _ = _with_end(ids, ids, tokenizer)
            return Segment(ids, list(ids), escaped=escaped)


def _scored(example: Example, tokenizer: Any) -> Asking[Segment]:
    """The tokens that a server of the trained head makes of the example, of which the head scores the last one.

    Nothing is added to what the tokenizer makes of a text, or the chat template of a conversation. A long text loses
    its end, as a tokenizer truncates it, and so all of it has labels; of others the last token has one, and is kept.
    """
    match example:
        case Chat(messages):
            ids = (yield from masks.rendering(example, len(messages), tokenizer, checked=True)).ids
        case Completion(prompt, completion, escaped):
            ids = yield from _text(prompt + completion, escaped, tokenizer)
        case Text(text, escaped):
            ids = yield from _text(text, escaped, tokenizer)
        case Tokens():
            ids = _tokens(example, tokenizer).input_ids
    labels = list(ids) if isinstance(example, Text) else [IGNORE] * (len(ids) - 1) + ids[-1:]
    escaped = not isinstance(example, Tokens) and example.escaped
    return Segment(list(ids), labels, escaped=escaped, media=media_in(example), scored=True)


def _prompt(example: Example, tokenizer: Any, control_tokens: ControlTokens) -> Asking[list[int]]:
    example = _escaped(example, tokenizer, control_tokens)
    match example:
        case Chat(messages):
            return (yield from masks.rendering(example, len(messages), tokenizer, prompt=True, checked=True)).ids
        case Completion(text, _, escaped) | Text(text, escaped):
            return (yield from _text(text, escaped, tokenizer, continued=True))
        case Tokens(input_ids):
            return input_ids


def _text(text: str, escaped: bool, tokenizer: Any, *, continued: bool = False) -> Asking[list[int]]:
    """The tokens of a text with those that the tokenizer writes around it, such as BOS, but no end if it is continued.

    A text in which they are parsed may have them already, and gets none twice. One that the chat template has rendered
    begins as the template's conversations do, and nothing follows it.
    """
    ids = (yield TextPart(text, special=True, escaped=escaped)).ids
    before, after, turns, opens = control.around(tokenizer)
    ids = ids[len(before) : len(ids) - len(after)]
    rendered = not turns.isdisjoint(ids)
    if ids[: len(before)] != before and (opens or not rendered):
        ids = before + ids
    return ids if continued or rendered or _end(ids, tokenizer) is not None else ids + after


def _with_end(ids: list[int], row: list[int], tokenizer: Any) -> tuple[list[int], int]:
    """The tokens of the last part of a `row` with what ends it, and how many of them a model writes.

    That is EOS, unless the text has an end: then nothing is added, and a model stops there, though a chat template
    writes more. In a conversation that the chat template has rendered, it is what ends a turn.
    """
    if (end := _end(ids, tokenizer)) is not None:
        return ids, end
    closing = [tokenizer.eos_token_id]
    if not control.around(tokenizer).turns.isdisjoint(row):
        of_turn = chat_template.end_of_turn(tokenizer)
        closing = closing if of_turn is None else [of_turn]
    return ids + closing, len(ids) + 1


def _end(ids: list[int], tokenizer: Any) -> int | None:
    """The index after the first token that ends an answer, of those after the last word; None without one."""
    special, end = chat_template.special_ids(tokenizer), None
    if special.isdisjoint(ids):
        return None
    ends = chat_template.stop_ids(tokenizer)
    for at in reversed(range(len(ids))):
        if ids[at] in ends:
            end = at + 1
        elif ids[at] not in special and tokenizer.decode([ids[at]]).strip():
            break
    return end


def _tokens(example: Tokens, tokenizer: Any) -> Segment:
    ids, size = example.input_ids, len(tokenizer)
    labels = list(ids) if example.labels is None else example.labels
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if not 0 <= token < size:
            raise RowError(f"`input_ids[{index}]` is {token}, but the tokenizer has {size:,} tokens")
        if label not in (IGNORE, token):
            raise RowError(
                f"`labels[{index}]` is {label}, but `input_ids[{index}]` is {token}: a label is {IGNORE} or the id at "
                "the same position; training shifts labels by one itself"
            )
    if example.teacher is not None and example.teacher.ids.max(initial=0) >= size:
        raise RowError(
            f"the teacher has token {example.teacher.ids.max()}, but the tokenizer has {size:,} tokens; a teacher must "
            "have the same ones"
        )
    return Segment(ids, labels, teacher=example.teacher)
