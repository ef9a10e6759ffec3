"""Translates the data sets of another tool's config into sources, and collects the other keys of its entries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import ConfigError


def sources(key: str, given: Mapping[str, Any]) -> list[str]:
    """The files and hub names under a key of the config: names in a text, or entries with a `path`; else none."""
    if isinstance(value := given[key], str):
        names = [value] if key == "dataset_name" else [name.strip() for name in value.split(",")]
        return [_registered(name, given) if key in ("dataset", "eval_dataset") else name for name in names]
    entries = _entries(value)
    if not all(isinstance(one, dict) and isinstance(one.get("path"), str) for one in entries):
        return []
    return [source for one in entries for source in _sources(one)]


def unknown(value: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values of the entries, besides their source, that do not hold here anyway."""
    for one in _entries(value) if not isinstance(value, str) else []:
        used = {_FILES} if one["path"] in _READERS else set()
        yield from ((name, said) for name, said in one.items() if name not in used and not _is_known(name, said))


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _sources(one: Mapping[str, Any]) -> list[str]:
    """The files or hub name of an entry; `path: json` with `data_files` is a reader with its files."""
    files = one.get(_FILES)
    files = [files] if isinstance(files, str) else files
    if one["path"] in _READERS and isinstance(files, list) and files and all(isinstance(file, str) for file in files):
        return files
    return [one["path"]]


_FILES = "data_files"
_READERS = ("json", "csv", "parquet", "text", "arrow")
_KNOWN_OF_A_SET: dict[str, tuple[Any, ...]] = {
    "type": ("alpaca", "chat_template", "sharegpt", "completion", "pretrain", "alpaca_chat.load_qa"),
    "split": ("train",),
    "chat_template": ("tokenizer_default",),
    "roles_to_train": (["assistant"], ["gpt"], "assistant"),
    "train_on_eos": ("turn",),
    "text_column": ("text",),
    "field": ("text",),
    "field_messages": ("messages", "conversations"),
    "message_property_mappings": ({"role": "from", "content": "value"}, {"role": "role", "content": "content"}),
}


def _is_known(name: str, value: Any) -> bool:
    """Whether a key of an entry holds here without being written: formats are recognised by the fields of rows."""
    harmless = name in ("path", "ds_type", "trust_remote_code") or value is None
    return harmless or value in _KNOWN_OF_A_SET.get(name, ())


def _registered(name: str, given: Mapping[str, Any]) -> str:
    """The file or hub name of a data set in LLaMA-Factory's dataset_info.json, or `name` itself. Raises ConfigError."""
    folder = Path(str(given.get("dataset_dir", "data")))
    try:
        entry = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))[name]
        columns = entry.get("columns", {}).keys()
        source = str(folder / entry["file_name"]) if "file_name" in entry else str(entry["hf_hub_url"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return name
    if columns & {"images", "videos", "audios"}:
        raise ConfigError(
            f"{folder / 'dataset_info.json'}: `{name}` has images, video or sound, which are not translated"
        )
    return source
