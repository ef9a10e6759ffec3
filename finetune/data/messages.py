"""Conversations: messages in OpenAI's and ShareGPT's formats, converted for chat templates.

TRL's converters assume valid rows; these name the invalid field.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from finetune.data import fields as row
from finetune.data import images
from finetune.data.encoded import RowImage
from finetune.data.examples import Chat, Message, NoSuchField, RowError
from finetune.data.fields import Fields

# The role in chat templates for each role in rows.
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
_SHAREGPT_ROLES = ROLES | {
    "human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool", "function_call": "assistant"
}  # fmt: skip
# Fields that only other kinds of models or training can use.
_MEDIA = ("video", "videos", "audio", "audios")
_VERDICTS = ("label", "kto_tag")
_BOOLEANS = ("true", "false", "0", "1", "0.0", "1.0")  # as written in JSON, tables and texts
# Keys of a message that say whether it is trained: our own, and OpenAI's `weight`, which is 0 or 1.
_SWITCHES = ("train", "weight")
# Types of the parts of a message that are text; the latter two are of OpenAI's Responses.
_TEXTS = ("text", "input_text", "output_text")
# How parts of other types are written for chat templates; the first three are Anthropic's.
_CURES = {
    "tool_use": "write it as `tool_calls` of the message: "
    '[{"id": ..., "type": "function", "function": {"name": ..., "arguments": its `input`}}]',
    "tool_result": 'write it as a message of its own: {"role": "tool", "tool_call_id": ..., "content": its text}',
    "thinking": "write its text as `reasoning_content` of the message",
    "refusal": "write its text as a part of type 'text'",
}
# What calls name their arguments: OpenAI, Llama and Anthropic.
_ARGUMENTS = ("arguments", "parameters", "input")
# How many keys of a message an error names.
_NAMED = 8


def conversation(messages: list[Message], fields: Fields, context: Iterable[int] = (), where: str = "messages") -> Chat:
    """The conversation with untrained turns as context; a `system` field of the row becomes its first message."""
    untrained = {at for at, message in enumerate(messages) if not _is_trained(message, f"{where}[{at}]")}
    plain = [{key: value for key, value in message.items() if key not in _SWITCHES} for message in messages]
    system = None if row.is_nothing(fields.get("system")) else row.text(fields, "system")
    opening = [] if system is None else [{"role": "system", "content": system}]
    if opening and plain[0]["role"] == "system":
        if plain[0]["content"] != system:
            raise RowError(f"`system` and `{where}[0]` are two system messages; keep one of them")
        opening = []
    answers = {at for at, message in enumerate(messages) if message["role"] == "assistant"}
    turned_off = frozenset(at + len(opening) for at in (untrained | set(context)) & answers)
    plain, shown = images.placed(plain, fields)
    return Chat([*opening, *plain], turned_off, _tools(fields), images=shown)


def _is_trained(message: Message, where: str) -> bool:
    for key in _SWITCHES:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1) or (key == "train" and not isinstance(value, bool)):
            allowed = "true or false" if key == "train" else "0 (not trained) or 1; nothing in between is supported"
            raise RowError(f"`{where}.{key}` must be {allowed}, not {value!r}")
        if value and message["role"] != "assistant":
            raise RowError(f"`{where}.{key}`: only the assistant's turns are trained; remove it from this message")
        if not value:
            return False
    return True


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The definitions of a row's functions as chat templates expect them."""
    read = []
    for name in ("tools", "functions"):  # the second is OpenAI's older name
        for index, tool in enumerate(row.objects(fields, name) or ()):
            where = f"{name}[{index}]"
            row.check_numbers(tool, where)
            wrapped = _function(tool, where, "`name`, `description` and `parameters`")
            function = dict(wrapped["function"])
            if "input_schema" in function and "parameters" not in function:  # Anthropic's name
                function["parameters"] = function.pop("input_schema")
            read.append({**wrapped, "function": function})
        if read:
            return read
    return None


def _function(value: Any, where: str, content: str) -> dict[str, Any]:
    """The definition or the call of a function, wrapped as in OpenAI's API; LLaMA-Factory and others write it bare."""
    if isinstance(value, Mapping) and "function" not in value and isinstance(value.get("name"), str):
        bare = {name: one for name, one in value.items() if (name, one) != ("type", "function")}
        number = {"id": bare.pop("id")} if "id" in bare else {}
        return {**number, "type": "function", "function": bare}
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"`{where}` must be an object with `function`, an object with {content}")
    return dict(value) if "type" in value else {"type": "function", **value}


def read_messages(fields: Fields, name: str) -> list[Message]:
    """The field `name` of a row, a list of messages in OpenAI's format."""
    return [read_message(message, f"{name}[{i}]") for i, message in enumerate(_list_of_messages(fields, name))]


def _list_of_messages(fields: Fields, name: str) -> list[Any]:
    messages = row.listed(fields.get(name), name)
    if not isinstance(messages, list) or not messages:
        kind = RowError if name in fields else NoSuchField
        raise kind(f"`{name}` must be a list with at least one message")
    return messages


def read_message(message: Any, where: str) -> Message:
    """One message as chat templates expect it: role, text, and tool calls with parsed arguments."""
    if not isinstance(message, Mapping):
        raise RowError(f"`{where}` must be an object with `role` and `content`, not {row.kind_of(message)}")
    read: Message = {key: value for key, value in message.items() if value is not None}
    read["role"] = _role(message, "role", ROLES, where)
    refuse_other_training(read, where + ".", answers=read["role"] == "assistant")
    if call := read.pop("function_call", None):  # OpenAI's older name for `tool_calls`
        read["tool_calls"] = read.get("tool_calls") or [call]
        read["content"] = read.get("content") or ""
    if "reasoning_content" in read:
        read["reasoning_content"] = _text(read, "reasoning_content", where)
    if read.get("tool_calls"):
        if read["role"] != "assistant":
            raise RowError(f"`{where}.tool_calls`: only the assistant calls tools")
        read["tool_calls"] = _tool_calls(read["tool_calls"], f"{where}.tool_calls")
        read.setdefault("content", "")
    read["content"] = _content(read, "content", where)
    return read


def instruction_messages(fields: Fields) -> list[Message]:
    """The history of an Alpaca row and its instruction, as messages."""
    messages = []
    history = row.parsed(fields.get("history") or [], "history")
    if not isinstance(history, list):
        raise RowError(f"`history` must be a list of question and answer pairs, not {row.kind_of(history)}")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"`history[{index}]` must be a pair of texts, a question and its answer")
        for turn, role in enumerate(("user", "assistant")):
            messages.append(read_message({"role": role, "content": pair[turn]}, f"history[{index}][{turn}]"))
    question = row.text(fields, "instruction")
    if fields.get("input"):
        question += "\n\n" + row.text(fields, "input")
    return [*messages, {"role": "user", "content": question}]


def any_message(message: Any, where: str) -> Message:
    """One message in OpenAI's format, or in ShareGPT's if it has `from`."""
    is_sharegpt = isinstance(message, Mapping) and "from" in message
    return _turn(message, where) if is_sharegpt else read_message(message, where)


def sharegpt_messages(fields: Fields) -> list[Message]:
    """The `conversations` of a row in ShareGPT's format."""
    turns = []
    for index, turn in enumerate(_list_of_messages(fields, "conversations")):
        where = f"conversations[{index}]"
        if not isinstance(turn, Mapping):
            raise RowError(f"`{where}` must be an object with `from` and `value`, not {row.kind_of(turn)}")
        turns.append(_turn(turn, where))
    return turns


def _turn(turn: Mapping[str, Any], where: str) -> Message:
    role = _role(turn, "from", _SHAREGPT_ROLES, where)
    rest = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    if turn["from"] != "function_call":
        return read_message({**rest, "role": role, "content": _content(turn, "value", where)}, where)
    calls = row.parsed(turn.get("value"), f"{where}.value")
    read = _tool_calls(calls if isinstance(calls, list) else [calls], f"{where}.value")
    return {**rest, "role": role, "content": "", "tool_calls": read}


def _role(message: Mapping[str, Any], key: str, roles: Mapping[str, str], where: str) -> str:
    role = message.get(key)
    if not isinstance(role, str) or role not in roles:
        raise RowError(f"`{where}.{key}` must be one of {', '.join(roles)}, not {role!r}")
    return roles[role]


def _content(message: Mapping[str, Any], key: str, where: str) -> str | list[str | RowImage]:
    """The text of a message; a list of text parts is joined, unless images are among them."""
    content = message.get(key)
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        parts = [_part(part, f"{where}.{key}[{index}]") for index, part in enumerate(content)]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else parts
    if isinstance(content, list) and any(isinstance(part, RowImage) for part in content):  # a list that was read before
        return content
    return _text(message, key, where)


def _text(message: Mapping[str, Any], key: str, where: str) -> str:
    content = message.get(key)
    if not isinstance(content, str):
        if content is None:
            has = ", ".join(f"`{name}`" for name in islice(message, _NAMED) if message[name] is not None)
            raise RowError(f"`{where}.{key}` is missing; the message has only {has}")
        raise RowError(f"`{where}.{key}` must be text, not {row.kind_of(content)}")
    row.check_encodable(content, f"{where}.{key}")
    return content


def _part(part: Mapping[str, Any], where: str) -> str | RowImage:
    kind = part.get("type", "text" if "text" in part else None)
    if kind in ("image", "image_url", "input_image"):
        return images.part({**part, "type": "image" if kind == "image" else "image_url"}, where)
    if kind not in _TEXTS:
        cure = _CURES.get(str(kind), "only text and images are trained here; remove the row")
        raise RowError(f"`{where}` is of type {kind!r}; {cure}")
    return _text(part, "text", where)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    calls = row.listed(calls, where)
    if not isinstance(calls, list):
        raise RowError(f"`{where}` must be a list, not {row.kind_of(calls)}")
    read = []
    for index, each in enumerate(calls):
        call = _function(each, f"{where}[{index}]", "`name` and `arguments`")
        function = dict(call["function"])
        name = next((name for name in _ARGUMENTS if function.get(name) is not None), "arguments")
        # OpenAI writes the arguments as JSON text; templates expect an object, which they serialize themselves.
        at = f"{where}[{index}].function.{name}"
        arguments = row.parsed(function.pop(name, None) or {}, at)
        if not isinstance(arguments, Mapping):
            raise RowError(f"`{at}` must be an object, not {row.kind_of(arguments)}")
        row.check_numbers(arguments, at)
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def refuse_unseen(fields: Fields, read: Collection[str]) -> None:
    """Raise RowError for a row with a column of images that is not among the fields that its format has read."""
    for name in images.COLUMNS:
        if name not in read and not row.is_nothing(fields.get(name)):
            raise RowError(
                f"`{name}`: images are shown in conversations alone; write `messages`, or remove the row, or only the "
                "field if possible"
            )


def refuse_other_training(fields: Fields, where: str = "", *, answers: bool) -> None:
    """Raise RowError for fields of a row or message that only other kinds of models or training can use.

    `answers`: whether it holds answers that may be labelled good or bad.
    """
    for name, value in fields.items():
        if name in (_MEDIA if not where else (*_MEDIA, *images.COLUMNS)) and not row.is_nothing(value):
            raise RowError(f"`{where}{name}`: only text is trained here; remove the row, or only the field if possible")
        if name in _VERDICTS and answers and str(value).lower() in _BOOLEANS:
            raise RowError(
                f"`{where}{name}` labels answers as good or bad (KTO), and bad ones would be trained too; set "
                "`training.objective: kto`, or keep the rows with good answers, without this field"
            )
