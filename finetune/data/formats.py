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
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
# What only other kinds of models or of training can learn from.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_VERDICTS = ("label", "kto_tag")


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered by the chat template.

    Assistant turns whose index is in `context` are shown to the model and not trained. `tools` are the functions the
    assistant may call, as JSON schemas for the template. The texts of an `escaped` example have stand-ins (control.py).
    """

    messages: list[Message]
    context: frozenset[int] = frozenset()
    tools: list[dict[str, Any]] | None = None
    escaped: bool = False


@dataclass(frozen=True)
class Completion:
    """A prompt and what should follow it, both plain text."""

    prompt: str
    completion: str
    escaped: bool = False


@dataclass(frozen=True)
class Text:
    """Plain text, learnt whole."""

    text: str
    escaped: bool = False


@dataclass(frozen=True)
class Tokens:
    """Token ids, and the labels that came with them (of the same length, -100 where not trained), if any."""

    input_ids: list[int]
    labels: list[int] | None = None


Example = Chat | Completion | Text | Tokens


ASKED: dict[str, Callable[[str], Example]] = {
    "chat": lambda text: Chat([{"role": "user", "content": text}]),
    "completion": lambda text: Completion(text, ""),
    "text": Text,
    "tokens": Text,
}
"""What a person asks, in the shape of the rows that were learnt; by the name of a kind of example (`kind`)."""


def kind(example: Example) -> str:
    """`chat`, `completion`, `text` or `tokens`."""
    return type(example).__name__.lower()


def shown(prompt: list[Message] | str) -> str:
    """A prompt as people read it: a question by itself, and a conversation with who says what."""
    if isinstance(prompt, str) or [message["role"] for message in prompt] == ["user"]:
        return prompt if isinstance(prompt, str) else str(prompt[0]["content"])
    return "\n".join(f"{message['role']}: {_said(message)}" for message in prompt)


def _said(message: Message) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join([*([message["content"]] if message["content"] or not calls else []), *calls])


class RowError(ValueError):
    """A row does not have the shape its format asks for; the message names the field."""


@dataclass(frozen=True)
class Format:
    """One kind of row: it is recognised by the fields it must have, and read by `read`.

    A format `of_answers` learns how to answer, so that each row must be a good example.
    """

    help: str
    required: tuple[str, ...]
    read: Callable[[Fields], Example]
    optional: tuple[str, ...] = ()
    of_answers: bool = True

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
        turns.append(_turn(turn, where))
    if not _is_nothing(fields.get("rejected")):
        raise RowError(
            "`rejected` beside `conversations`: the answer to prefer is not in the conversation, so it would not be "
            "learnt. Write the row as `prompt` (a list of messages), `chosen` and `rejected`"
        )
    return _conversation(turns, fields, where="conversations")


def _turn(turn: Mapping[str, Any], where: str) -> Message:
    role = _role(turn, "from", _SHAREGPT_ROLES, where)
    rest = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    if turn["from"] != "function_call":
        return _message({**rest, "role": role, "content": _content(turn, "value", where)}, where)
    calls = _json(turn.get("value"), f"{where}.value")
    wrapped = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
    return {**rest, "role": role, "content": "", "tool_calls": _tool_calls(wrapped, f"{where}.value")}


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
    _refuse_other_training(read, where + ".", answers=read["role"] == "assistant")
    if call := read.pop("function_call", None):  # as OpenAI had it before `tool_calls`
        read["tool_calls"] = read.get("tool_calls") or [{"type": "function", "function": call}]
        read["content"] = read.get("content") or ""
    if "reasoning_content" in read:
        read["reasoning_content"] = _content(read, "reasoning_content", where)
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
    """The conversation without its switches, and with the turns that they leave out as context.

    A system message of the row's own opens it.
    """
    left_out = set(context)
    for index, message in enumerate(messages):
        if not _is_trained(message, f"{where}[{index}]"):
            left_out.add(index)
    plain = [{key: value for key, value in message.items() if key not in _SWITCHES} for message in messages]
    opening = [] if _is_nothing(fields.get("system")) else [{"role": "system", "content": _text(fields, "system")}]
    if opening and plain[0]["role"] == "system":
        if plain[0]["content"] != opening[0]["content"]:
            raise RowError(f"`system` and `{where}[0]` are two system messages; keep one of them")
        opening = []
    answers = {index for index, message in enumerate(messages) if message["role"] == "assistant"}
    turned_off = frozenset(index + len(opening) for index in left_out & answers)
    return Chat([*opening, *plain], turned_off, _tools(fields))


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
    tools, functions = (_objects(fields, name) for name in ("tools", "functions"))
    # As OpenAI had them before `tools`.
    return tools or (functions and [{"type": "function", "function": function} for function in functions])


def _objects(fields: Fields, name: str) -> list[dict[str, Any]] | None:
    """A field's list of objects, perhaps as JSON text; None where there is nothing in it."""
    found = _json(fields.get(name) or None, name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise RowError(f"`{name}` must be a list of objects, not {_kind(found)}")
    return [dict(one) for one in found]


# -- a question and its answer ---------------------------------------------------------------------------------------


def _prompt_completion(fields: Fields) -> Example:
    if isinstance(fields.get("prompt"), list) and isinstance(fields.get("completion"), list):
        prompt, completion = _read_messages(fields, "prompt"), _read_messages(fields, "completion")
        return _conversation([*prompt, *completion], fields, range(len(prompt)))
    return Completion(_text(fields, "prompt"), _text(fields, "completion"))


def _alpaca(fields: Fields) -> Example:
    asked = _instruction(fields)
    return _conversation([*asked, {"role": "assistant", "content": _text(fields, "output")}], fields)


def _instruction(fields: Fields) -> list[Message]:
    """The earlier turns of an Alpaca row, and its question."""
    messages = []
    history = _json(fields.get("history") or [], "history")
    if not isinstance(history, list):
        raise RowError(f"`history` must be a list of pairs of question and answer, not {_kind(history)}")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"`history[{index}]` must be a question and its answer, two texts")
        said = dict(zip(("user", "assistant"), pair, strict=True))
        messages += [{"role": role, "content": _content(said, role, f"history[{index}]")} for role in said]
    question = _text(fields, "instruction")
    if fields.get("input"):
        question += "\n\n" + _text(fields, "input")
    return [*messages, {"role": "user", "content": question}]


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
    if fields.get("instruction") is not None:
        asked = _instruction(fields)
        return _conversation([*asked, {"role": "assistant", "content": chosen_text}], fields, range(len(asked)))
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
    if fields.get("prompt") is None:
        return [] if fields.get("instruction") is None else _instruction(fields)
    return [{"role": "user", "content": _text(fields, "prompt")}]


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


class _Noted(dict[str, Any]):
    """The fields of a row, which notes those that are read."""

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def read(fields: Fields, form: str, columns: Mapping[str, str]) -> tuple[Example, list[str]]:
    """A row's example, and the names of the fields that hold something and are not used.

    Raises RowError for a row without the shape that `form` asks for, and for one that only other kinds of training can
    learn from.
    """
    fields = mapped(fields, columns)
    form = detect(fields) if form == "auto" else form
    noted = _Noted(fields)
    own = {name: fields[name] for name in fields.keys() - columns.values()}
    _refuse_other_training(own, answers=FORMATS[form].of_answers)
    example = FORMATS[form].read(noted)
    unused = fields.keys() - noted.read - set(columns.values())
    return example, [name for name in fields if name in unused and not _is_nothing(fields[name])]


def _refuse_other_training(fields: Fields, where: str = "", *, answers: bool) -> None:
    """Raise RowError for fields of a row or message that only other kinds of training can learn from.

    `answers`: whether it holds answers, about which a verdict may be given.
    """
    for name, value in fields.items():
        if name in _MEDIA and not _is_nothing(value):
            raise RowError(
                f"`{where}{name}`: only text is trained here, so leave the row out, or the field where it can go"
            )
        if name in _VERDICTS and answers and _is_verdict(value):
            raise RowError(
                f"`{where}{name}` says which answers are good and which are bad (KTO), and bad ones would be learnt as "
                "good ones here; keep the rows of good answers, without this field"
            )


def _is_nothing(value: Any) -> bool:
    """Whether a field is there for other rows: null, or empty."""
    return value is None or (isinstance(value, (str, bytes, list, Mapping)) and not value)


def _is_verdict(value: Any) -> bool:
    """Whether it is true or false, as JSON, a table or a text file have it."""
    return str(value).lower() in ("true", "false", "0", "1", "0.0", "1.0")


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
        ("tools", "functions", "system"),
    ),
    "sharegpt": Format(
        "`conversations` with from and value, perhaps `system` and `tools`",
        ("conversations",),
        _sharegpt,
        ("tools", "functions", "system"),
    ),
    "preference": Format(
        "`chosen` and `rejected`, perhaps `prompt`, text or messages; the chosen answer is learnt",
        ("chosen", "rejected"),
        _preference,
        ("prompt", "instruction", "input", "history", "tools", "functions", "system"),
    ),
    "prompt_completion": Format(
        "`prompt` and `completion`, text or messages; the completion is learnt",
        ("prompt", "completion"),
        _prompt_completion,
        ("tools", "functions", "system"),
    ),
    "alpaca": Format(
        "`instruction`, `output` and perhaps `input`, `system` and `history`",
        ("instruction", "output"),
        _alpaca,
        ("input", "history", "tools", "functions", "system"),
    ),
    "tokenized": Format(
        "`input_ids`, perhaps `labels` (else all are trained) and `attention_mask`",
        ("input_ids",),
        _tokenized,
        ("labels", "attention_mask"),
        of_answers=False,
    ),
    "text": Format("`text`, learnt whole", ("text",), _plain_text, of_answers=False),
}
