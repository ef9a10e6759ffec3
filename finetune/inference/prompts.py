"""Prompts from a file or standard input."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data import readers
from finetune.data.examples import Example, RowError
from finetune.data.fields import text
from finetune.data.messages import conversation, read_messages
from finetune.data.problems import Problems
from finetune.errors import ConfigError, DataError


@dataclass(frozen=True)
class Prompt:
    """A prompt as an example without an answer, and the row it came from."""

    example: Example
    row: dict[str, Any]


def from_file(path: Path, asked: Callable[[str], Example]) -> list[Prompt]:
    """The prompts of a file: rows with `messages` or `prompt`, or lines of text; `asked` makes an example of a text.

    Raises DataError, with every problem, for rows that are not prompts, and for an empty or missing file.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file")
    prompts: list[Prompt] = []
    with Problems() as problems:
        read = readers.reader(path) or readers.READERS[".txt"]
        for location, fields in read(path, problems):
            row = {"prompt" if name == "text" else name: value for name, value in fields.items()}
            try:
                prompts.append(Prompt(_example(row, asked), row))
            except RowError as error:
                problems.add(f"{location}: {error}")
    if not prompts:
        raise DataError(f"{path}: no prompts; write one a line, or JSON lines with `prompt` or `messages`")
    return prompts


def from_standard_input(asked: Callable[[str], Example]) -> list[Prompt]:
    """The prompts of standard input: JSON lines if it begins with a brace, otherwise lines of text.

    Raises ConfigError if that is a terminal, DataError as `from_file`.
    """
    if sys.stdin.isatty():
        raise ConfigError(
            "no prompt; give --prompt or --file, or pipe prompts in (`finetune chat` is for a conversation)"
        )
    content = sys.stdin.buffer.read()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("stdin.jsonl" if content.lstrip().startswith(b"{") else "stdin.txt")
        path.write_bytes(content)
        try:
            return from_file(path, asked)
        except DataError as error:
            raise DataError(str(error).replace(str(path), "standard input")) from None


def _example(row: dict[str, Any], asked: Callable[[str], Example]) -> Example:
    name = "messages" if "messages" in row else "prompt"
    if name == "prompt" and not isinstance(row.get("prompt"), list):
        return asked(text(row, "prompt"))
    example = conversation(read_messages(row, name), row, where=name)
    if example.messages[-1]["role"] == "assistant":
        raise RowError(f"`{name}` ends with the assistant's answer; remove that message")
    return example
