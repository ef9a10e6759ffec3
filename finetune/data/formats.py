"""Formats: from a row's fields to an example. A new format is one entry in FORMATS."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from finetune.config.fields import unknown

Message = dict[str, Any]
Fields = Mapping[str, Any]

# Roles as rows may call them, and as chat templates know them.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered by the chat template.

    Assistant turns whose index is in `context` are shown to the model and not trained. `tools` are the functions the
    assistant may call, as JSON schemas for the template.
    """

    messages: list[Message]
    context: frozenset[int] = frozenset()
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and what should follow it, both plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text, learnt whole."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Token ids, and the labels that came with them (of the same length, -100 where not trained), if any."""

    input_ids: list[int]
    labels: list[int] | None = None


Example = Chat | Completion | Text | Tokens


class RowError(ValueError):
    """A row does not have the shape its format asks for; the message names the field."""


@dataclass(frozen=True)
class Format:
    """One kind of row: it is recognised by the fields it must have, and read by `read`."""

    help: str
    required: tuple[str, ...]
    read: Callable[[Fields], Example]
    optional: tuple[str, ...] = ()

    def matches(self, fields: Fields) -> bool:
        return all(name in fields for name in self.required)


# -- conversations ---------------------------------------------------------------------------------------------------


def _messages(fields: Fields) -> Example:
    return _conversation(_read_messages(fields, "messages"), fields)


def _sharegpt(fields: Fields) -> Example:
    turns = []
    for index, turn in enumerate(_list_of_messages(fields, "conversations")):
        where = f"conversations[{index}]"
        if not isinstance(turn, Mapping):
            raise RowError(f"`{where}` must be an object with `from` and `value`, not {_kind(turn)}")
        rest = {key: turn[key] for key in _SWITCHES if key in turn}
        role = _role(turn, "from", _SHAREGPT_ROLES, where)
        turns.append({"role": role, "content": _content(turn, "value", where), **rest})
    return _conversation(turns, fields, where="conversations")


def _list_of_messages(fields: Fields, name: str) -> list[Any]:
    messages = fields.get(name)
    if not isinstance(messages, list) or not messages:
        raise RowError(f"`{name}` must be a list with at least one message")
    return messages


def _read_messages(fields: Fields, name: str) -> list[Message]:
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(_list_of_messages(fields, name))]


def _message(message: Any, where: str) -> Message:
    """One message in the terms of chat templates: role, text, and the calls of tools with their arguments parsed."""
    if not isinstance(message, Mapping):
        raise RowError(f"`{where}` must be an object with `role` and `content`, not {_kind(message)}")
    read: Message = {key: value for key, value in message.items() if value is not None}
    read["role"] = _role(message, "role", ROLES, where)
    if read.get("tool_calls"):
        if read["role"] != "assistant":
            raise RowError(f"`{where}.tool_calls`: only the assistant calls tools")
        read["tool_calls"] = _tool_calls(read["tool_calls"], f"{where}.tool_calls")
        read.setdefault("content", "")
    read["content"] = _content(read, "content", where)
    return read


def _role(message: Mapping[str, Any], key: str, roles: Mapping[str, str], where: str) -> str:
    role = message.get(key)
    if not isinstance(role, str) or role not in roles:
        raise RowError(f"`{where}.{key}` must be one of {', '.join(roles)}, not {role!r}")
    return roles[role]


def _content(message: Mapping[str, Any], key: str, where: str) -> str:
    """The text of a message, its parts joined where it is a list of text parts."""
    content = message.get(key)
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        return "".join(_part(part, f"{where}.{key}[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise RowError(f"`{where}.{key}` must be text, not {_kind(content)}")
    _check_encodable(content, f"{where}.{key}")
    return content


def _part(part: Mapping[str, Any], where: str) -> str:
    if part.get("type") != "text":
        raise RowError(f"`{where}` is of type {part.get('type')!r}; only text is trained here, so leave the row out")
    return _content(part, "text", where)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError(f"`{where}` must be a list, not {_kind(calls)}")
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(
                f"`{where}[{index}]` must be an object with `function`, an object with `name` and `arguments`"
            )
        # OpenAI writes the arguments as JSON text; templates write the object as JSON themselves.
        arguments = _json(function.get("arguments") or {}, f"{where}[{index}].function.arguments")
        if not isinstance(arguments, Mapping):
            raise RowError(f"`{where}[{index}].function.arguments` must be an object, not {_kind(arguments)}")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _json(value: Any, where: str) -> Any:
    """A value, or what it stands for where it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"`{where}` is not valid JSON: {error}") from None


# What a message may say about being trained: our own key, and OpenAI's, which knows 0 and 1.
_SWITCHES = ("train", "weight")


def _conversation(
    messages: list[Message], fields: Fields, context: Iterable[int] = (), where: str = "messages"
) -> Chat:
    """The conversation without its switches, and with the turns that they leave out as context."""
    left_out = set(context)
    for index, message in enumerate(messages):
        if not _is_trained(message, f"{where}[{index}]"):
            left_out.add(index)
    plain = [{key: value for key, value in message.items() if key not in _SWITCHES} for message in messages]
    answers = {index for index, message in enumerate(messages) if message["role"] == "assistant"}
    return Chat(plain, frozenset(left_out & answers), _tools(fields))


def _is_trained(message: Message, where: str) -> bool:
    for key in _SWITCHES:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1) or (key == "train" and not isinstance(value, bool)):
            allowed = "true or false" if key == "train" else "0 (not trained) or 1; no weights between are known"
            raise RowError(f"`{where}.{key}` must be {allowed}, not {value!r}")
        if value and message["role"] != "assistant":
            raise RowError(f"`{where}.{key}`: only the assistant's turns are trained; take it from this message")
        if not value:
            return False
    return True


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools = _json(fields.get("tools") or None, "tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"`tools` must be a list of objects, not {_kind(tools)}")
    return [dict(tool) for tool in tools]


# -- a question and its answer ---------------------------------------------------------------------------------------


def _prompt_completion(fields: Fields) -> Example:
    if isinstance(fields.get("prompt"), list) and isinstance(fields.get("completion"), list):
        prompt, completion = _read_messages(fields, "prompt"), _read_messages(fields, "completion")
        return _conversation([*prompt, *completion], fields, range(len(prompt)))
    return Completion(_text(fields, "prompt"), _text(fields, "completion"))


def _alpaca(fields: Fields) -> Example:
    question = _text(fields, "instruction")
    if fields.get("input"):
        question += "\n\n" + _text(fields, "input")
    answer = _text(fields, "output")
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _preference(fields: Fields) -> Example:
    """The chosen answer after the prompt; without a prompt, after what chosen and rejected have in common."""
    if isinstance(fields.get("chosen"), list):
        chosen, rejected = _read_messages(fields, "chosen"), _read_messages(fields, "rejected")
        prompt = _prompt_messages(fields)
        common = min(in_common(chosen, rejected), len(chosen) - 1)
        # Some data sets repeat the prompt at the head of each answer.
        if chosen[: len(prompt)] == prompt:
            return _conversation(chosen, fields, range(common))
        return _conversation([*prompt, *chosen], fields, range(len(prompt) + common))
    chosen_text, rejected_text = _text(fields, "chosen"), _text(fields, "rejected")
    if fields.get("prompt") is not None:
        return Completion(_text(fields, "prompt"), chosen_text)
    shared = chosen_text[: in_common(chosen_text, rejected_text)]
    # Back to white space, so that the answer begins with a whole word.
    shared = shared[: len(shared.rstrip()) if shared[-1:].isspace() else max(shared.rfind(" "), shared.rfind("\n"), 0)]
    return Completion(shared, chosen_text[len(shared) :])


def in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _prompt_messages(fields: Fields) -> list[Message]:
    if isinstance(fields.get("prompt"), list):
        return _read_messages(fields, "prompt")
    return [] if fields.get("prompt") is None else [{"role": "user", "content": _text(fields, "prompt")}]


# -- text and tokens -------------------------------------------------------------------------------------------------


def _plain_text(fields: Fields) -> Example:
    return Text(_text(fields, "text"))


def _tokenized(fields: Fields) -> Example:
    """Ids and labels without the padding that `attention_mask` tells."""
    ids = _integers(fields, "input_ids")
    labels = None if fields.get("labels") is None else _integers(fields, "labels", len(ids))
    mask = [1] * len(ids) if fields.get("attention_mask") is None else _integers(fields, "attention_mask", len(ids))
    if not set(mask) <= {0, 1}:
        raise RowError("`attention_mask` must be made of 0 and 1")
    start = mask.index(1) if 1 in mask else len(mask)
    end = start + sum(mask)
    if 0 in mask[start:end]:
        raise RowError(
            f"`attention_mask[{mask.index(0, start)}]` hides a token in the middle; only padding is left out"
        )
    return Tokens(ids[start:end], None if labels is None else labels[start:end])


def _integers(fields: Fields, name: str, length: int | None = None) -> list[int]:
    values = fields.get(name)
    if not isinstance(values, list):
        raise _missing_or(fields, name, "a list")
    for index, value in enumerate(values):
        if type(value) is not int:
            raise RowError(f"`{name}[{index}]` must be a whole number, not {_kind(value)}")
    if length is not None and len(values) != length:
        raise RowError(f"`{name}` has {len(values)} values and `input_ids` has {length}")
    return values


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _missing_or(fields, name, "text")
    _check_encodable(value, name)
    return value


def _missing_or(fields: Fields, name: str, wanted: str) -> RowError:
    return RowError(
        f"`{name}` must be {wanted}, not {_kind(fields[name])}" if name in fields else f"`{name}` is missing"
    )


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


# -- which format, which columns -------------------------------------------------------------------------------------


# Of those a row has, where none is known: a wide table has thousands.
_NAMED_FIELDS = 20
_COMPARED_FIELDS = 1000


def detect(fields: Fields) -> str:
    """The name of the first format whose fields a row has. Raises RowError naming the fields it found."""
    for name, form in FORMATS.items():
        if name != "auto" and form.matches(fields):
            return name
    wanted = "; ".join(f"{name}: {form.help}" for name, form in FORMATS.items() if name != "auto")
    found = ", ".join(map(str, islice(fields, _NAMED_FIELDS))) + (" and more" if len(fields) > _NAMED_FIELDS else "")
    raise RowError(f"no format has the fields {found}; `data.columns` can map them. Known are {wanted}")


def mapped(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """The fields under the names that formats know, by `columns` (format's field to the row's column).

    Raises RowError for a column that the row lacks.
    """
    for name, column in columns.items():
        if column not in fields:
            near = unknown(column, islice(fields, _COMPARED_FIELDS))
            raise RowError(f"`data.columns` takes `{name}` from a column that is not here: {near}")
    return {**fields, **{name: fields[column] for name, column in columns.items()}}


def known_fields(form: str) -> list[str]:
    """The fields that a format reads; of `auto`, those of all."""
    forms = FORMATS.values() if form == "auto" else [FORMATS[form]]
    return list(dict.fromkeys(name for form in forms for name in (*form.required, *form.optional)))


def _auto(fields: Fields) -> Example:
    return FORMATS[detect(fields)].read(fields)


FORMATS: dict[str, Format] = {
    "auto": Format("the format of the first row", (), _auto),
    "messages": Format(
        "`messages` with role and content, perhaps `tool_calls`, and `tools` of the row (OpenAI's)",
        ("messages",),
        _messages,
        ("tools",),
    ),
    "sharegpt": Format("`conversations` with from and value", ("conversations",), _sharegpt, ("tools",)),
    "preference": Format(
        "`chosen` and `rejected`, perhaps `prompt`, text or messages; the chosen answer is learnt",
        ("chosen", "rejected"),
        _preference,
        ("prompt", "tools"),
    ),
    "prompt_completion": Format(
        "`prompt` and `completion`, text or messages; the completion is learnt",
        ("prompt", "completion"),
        _prompt_completion,
        ("tools",),
    ),
    "alpaca": Format("`instruction`, `output` and perhaps `input`", ("instruction", "output"), _alpaca, ("input",)),
    "tokenized": Format(
        "`input_ids`, perhaps `labels` (else all are trained) and `attention_mask`",
        ("input_ids",),
        _tokenized,
        ("labels", "attention_mask"),
    ),
    "text": Format("`text`, learnt whole", ("text",), _plain_text),
}
