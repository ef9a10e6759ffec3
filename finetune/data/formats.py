"""Formats: from a row's fields to an example. A new format is one entry in FORMATS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Fields = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered by the chat template; assistant turns before `trained_from` are only context."""

    messages: list[Message]
    trained_from: int = 0


@dataclass(frozen=True)
class Completion:
    """A prompt and what should follow it, both plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text, learnt whole."""

    text: str


Example = Chat | Completion | Text


class RowError(ValueError):
    """A row does not have the shape its format asks for; the message names the field."""


@dataclass(frozen=True)
class Format:
    """How one kind of row is recognised and read."""

    help: str
    matches: Callable[[Fields], bool]
    read: Callable[[Fields], Example]


def _messages(fields: Fields) -> Example:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RowError("`messages` must be a list with at least one message")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    return Chat(messages)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        raise RowError(f"`{where}` must be an object with `role` and `content`, not {_kind(message)}")
    if message.get("role") not in ROLES:
        raise RowError(f"`{where}.role` must be one of {', '.join(ROLES)}, not {message.get('role')!r}")
    if not isinstance(message.get("content"), str):
        raise RowError(f"`{where}.content` must be text, not {_kind(message.get('content'))}")
    _check_encodable(message["content"], f"{where}.content")


def _prompt_completion(fields: Fields) -> Example:
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        for name, messages in (("prompt", prompt), ("completion", completion)):
            for index, message in enumerate(messages):
                _check_message(message, f"{name}[{index}]")
        return Chat([*prompt, *completion], trained_from=len(prompt))
    return Completion(_text(fields, "prompt"), _text(fields, "completion"))


def _alpaca(fields: Fields) -> Example:
    question = _text(fields, "instruction")
    if fields.get("input"):
        question += "\n\n" + _text(fields, "input")
    answer = _text(fields, "output")
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _plain_text(fields: Fields) -> Example:
    return Text(_text(fields, "text"))


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise RowError(f"`{name}` is missing" if name not in fields else f"`{name}` must be text, not {_kind(value)}")
    _check_encodable(value, name)
    return value


def _check_encodable(text: str, where: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"`{where}` has half of a surrogate pair at character {error.start + 1}") from None


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
    }
    return names.get(type(value), "an object")


def detect(fields: Fields) -> str:
    """The name of the first format whose fields a row has. Raises RowError naming the fields it found."""
    for name, form in FORMATS.items():
        if name != "auto" and form.matches(fields):
            return name
    wanted = "; ".join(f"{name}: {form.help}" for name, form in FORMATS.items() if name != "auto")
    raise RowError(f"no format has the fields {', '.join(map(str, fields))}. Known are {wanted}")


def _auto(fields: Fields) -> Example:
    return FORMATS[detect(fields)].read(fields)


FORMATS: dict[str, Format] = {
    "auto": Format("the format of the first row", lambda fields: False, _auto),
    "messages": Format("`messages` with role and content", lambda fields: "messages" in fields, _messages),
    "prompt_completion": Format(
        "`prompt` and `completion`, text or messages",
        lambda fields: "prompt" in fields and "completion" in fields,
        _prompt_completion,
    ),
    "alpaca": Format(
        "`instruction`, `output` and perhaps `input`",
        lambda fields: "instruction" in fields and "output" in fields,
        _alpaca,
    ),
    "text": Format("`text`, learnt whole", lambda fields: "text" in fields, _plain_text),
}
