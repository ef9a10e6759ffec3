"""What a JSON file holds that is not a list of rows, and how its owner makes rows of it."""

from __future__ import annotations

import json
import re
from typing import Any

from finetune.data.lines import ROW_BYTES
from finetune.data.strict_json import Decoder, JsonError

_PANDAS = 'write rows with `pandas.read_json(FILE, orient="{}").to_json(NEW_FILE, orient="records")`'

# Fields of rows that are lists of objects.
_LISTS = ("messages", "conversations", "tools", "functions", "prompt", "completion", "chosen", "rejected", "answers")
_WRITERS = frozenset({"sender", "sender_name", "author", "from", "speaker", "user", "user_id"})


def advice(text: str) -> str:
    """For a message about the file of this `text`, which does not begin with a bracket."""
    try:
        value = Decoder().read(text) if len(text) <= ROW_BYTES else None
    except JsonError:
        value = None
    if not isinstance(value, dict) or not value:
        return "expected a list of objects; if it has one object per line, name the file .jsonl"
    # A table of pandas in one object: in parts, or by columns.
    lists = {key: each for key, each in value.items() if _is_list_of_objects(each)}
    columns = list(value.values())
    numbered = all(isinstance(each, dict) and all(map(str.isdecimal, each)) for each in columns)
    equal = not lists and all(isinstance(each, list) for each in columns) and len({*map(len, columns)}) == 1
    split = isinstance(value.get("columns"), list) and isinstance(value.get("data"), list)
    if split or numbered or equal:
        table = _PANDAS.format("split" if split else "columns")
        return f"expected a list of rows, not a table of pandas; {table}"
    if any("role" in each[0] or {"from", "value"} <= each[0].keys() for each in lists.values()):
        return "expected a list of rows, not one row; make a list with `jq -s .`"
    if not lists and all(isinstance(each, dict) for each in value.values()):
        return "expected a list of rows, not an object of them; make a list with `jq '[.[]]'`"
    if not lists:
        return "expected a list of rows, not one object; if it is a row, make a list with `jq -s .`"
    return _about_list(*max(lists.items(), key=lambda item: len(item[1])))


def _about_list(key: str, items: list[dict[str, Any]]) -> str:
    """What to do with the longest list of objects in an object, its field `key`."""
    nested = [name for name, each in items[0].items() if name not in _LISTS and _is_list_of_objects(each)]
    if nested:
        return (
            f"expected a list of rows, which are nested here, in `{key}` and its `{nested[0]}`; write a program that "
            "makes an object of each, with the fields of a format"
        )
    if _WRITERS & {name.lower() for name in items[0]}:
        return (
            f"`{key}` has the messages of a chat, each with its writer; make one row of each conversation, "
            '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
        )
    path = f".{key}" if re.fullmatch("[A-Za-z_]+", key) else f"'.[{json.dumps(key)}]'"
    return f"expected a list of objects, not an object with `{key}`; extract it with `jq {path}`"


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
