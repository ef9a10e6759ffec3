"""Examples: the content of a row, independent of its format, as used by training and generation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.encoded import RowImage, Teacher

Message = dict[str, Any]


class RowError(ValueError):
    """A row does not fit its format; the message names the field."""


class NoSuchField(RowError):
    """A row lacks a field; the names of its fields may be wrong."""


class Unusable(Exception):
    """A row of the right form that teaches nothing, such as a tie of two answers: it is dropped for this reason."""


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered by the chat template.

    Assistant turns whose index is in `context` are shown to the model but not trained. `tools` are the functions the
    assistant may call, as JSON schemas for the template. Texts of an `escaped` example contain stand-ins (control.py).
    The content of a message that shows `images` is a list of parts, of type `text` or `image`; the images of all
    messages are in order.
    """

    messages: list[Message]
    context: frozenset[int] = frozenset()
    tools: list[dict[str, Any]] | None = None
    escaped: bool = False
    images: tuple[RowImage, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A prompt and what should follow it, both plain text; in `one_text`, the two parts of one text."""

    prompt: str
    completion: str
    escaped: bool = False
    one_text: bool = False

    @property
    def runs_together(self) -> bool:
        """Whether no white space separates a prompt from the completion that was written apart from it."""
        return not self.one_text and self.prompt[-1:].strip() != "" and self.completion[:1].strip() != ""


@dataclass(frozen=True)
class Text:
    """Plain text, all of it trained, with an end-of-text token."""

    text: str
    escaped: bool = False


@dataclass(frozen=True)
class Tokens:
    """Token ids with optional labels (of the same length; -100 where not trained).

    `likely` has, for each token, the log-probabilities of a teacher's likeliest ones by id; `teacher` those that are
    kept.
    """

    input_ids: list[int]
    labels: list[int] | None = None
    likely: Sequence[Mapping[int, float]] | None = field(default=None, compare=False)
    teacher: Teacher | None = field(default=None, compare=False)


Example = Chat | Completion | Text | Tokens
"""The content of one token sequence."""


@dataclass(frozen=True)
class Several:
    """A row of several segments by name, such as `chosen` and `rejected`, each encoded and trained as an example.

    `values` are numbers of the row for its objective, such as a margin. All rows of a data set have the same names.
    `label` is the name of the row's class, whose number becomes a value once all classes are known.
    """

    segments: Mapping[str, Example]
    values: Mapping[str, float] = field(default_factory=dict)
    label: str | None = None


Content = Example | Several
"""The content of a row."""

KINDS = ("chat", "completion", "text", "tokens")
"""The kinds of examples (`kind`)."""


def asked(kind: str, text: str, separator: str, system: str = "") -> Example:
    """A person's prompt as an example of a kind that was trained; a text to be completed ends with `separator`."""
    if kind == "chat":
        return Chat([*opening(system), {"role": "user", "content": text}])
    return Completion(text + separator, "") if kind == "completion" else Text(text)


def opening(system: str) -> list[Message]:
    """The messages with which a conversation begins: the system message, unless it is empty."""
    return [{"role": "system", "content": system}] if system else []


def parts(content: Content) -> tuple[Example, ...]:
    """The examples of a row's segments, in order."""
    return tuple(content.segments.values()) if isinstance(content, Several) else (content,)


def media_in(example: Example) -> tuple[RowImage, ...]:
    """The images that an example shows, in order."""
    return example.images if isinstance(example, Chat) else ()


def text_of(message: Message) -> str:
    """The text of a message, without the images that it shows."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def system(content: Content) -> str:
    """The system message of a conversation, of the first segment if there are several; empty without one."""
    example = parts(content)[0]
    first = example.messages[0] if isinstance(example, Chat) else {}
    return str(first["content"]) if first.get("role") == "system" else ""


def learnt(events: Iterable[Mapping[str, Any]]) -> str | None:
    """The kind of example, one of `KINDS`, that a run last trained by its events; None if they do not say."""
    kinds = [kind for event in events if (kind := str(event.get("learns"))) in KINDS]
    return kinds[-1] if kinds else None


def kind(content: Content) -> str:
    """`chat`, `completion`, `text` or `tokens`; of several segments, the first one's."""
    return type(parts(content)[0]).__name__.lower()


def shown(prompt: Chat | Completion) -> str:
    """A prompt for display: a single user message without its role, a conversation with one role per line."""
    if isinstance(prompt, Completion):
        return prompt.prompt
    names = (Path(image.path).name or f"image {image.digest[:8]}" for image in prompt.images)
    if [message["role"] for message in prompt.messages] == ["user"]:
        return _written(prompt.messages[0], names)
    turns = []
    for message in prompt.messages:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
        text = [_written(message, names)] if message["content"] or not calls else []
        turns.append(f"{message['role']}: " + "\n".join([*text, *calls]))
    return "\n".join(turns)


def _written(message: Message, names: Iterator[str]) -> str:
    """The text of a message, with the next of `names` in the place of each image."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return " ".join(f"[{next(names)}]" if part["type"] == "image" else part["text"] for part in content)


def in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def whole_words_in_common(first: str, second: str) -> int:
    """Length of the common prefix, cut back to white space, so that what follows begins with a whole word."""
    shared = first[: in_common(first, second)]
    return len(shared.rstrip()) if shared[-1:].isspace() else max(shared.rfind(" "), shared.rfind("\n"), 0)
