"""The built-in rows `builtin:python_docs` and `builtin:python_pairs`: questions about Python's standard library.

Their file comes with the package; `data/build_python_docs.py` made it of the docstrings of one version of Python.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

from finetune import builtin
from finetune.config.field_types import unknown
from finetune.data.problems import Problems
from finetune.data.source_kinds import Record, SourceKind, digest, no_files
from finetune.data.splits import Split
from finetune.errors import DataError

FILE = builtin.file("data/python_docs.jsonl.gz")


def conversations(split: Split) -> list[dict[str, Any]]:
    """Question-and-answer rows `{"messages": [user, assistant]}` of one side of the split, sorted by name."""
    return [{"messages": [*row["prompt"], *row["chosen"]]} for row in pairs(split)]


def pairs(split: Split) -> list[dict[str, Any]]:
    """Rows `{"prompt", "chosen", "rejected"}` of one side of the split: each question with its answer, and with the
    same answer in which words are out of order.
    """
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["split"] == split]
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in rows
    ]


BUILTIN: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "builtin:python_docs": conversations,
    "builtin:python_pairs": pairs,
}


class BuiltIn(SourceKind):
    """Rows that come with this package."""

    def has(self, source: str) -> bool:
        return source.startswith("builtin:")

    def records(
        self, source: str, split: str, key: str, problems: Problems, encoding: str | None
    ) -> Iterator[Record]:  # fmt: skip
        if source not in BUILTIN:
            raise DataError(f"data source {unknown(source, BUILTIN)}")

        def read() -> Iterator[Record]:  # only where they are not prepared yet
            for index, fields in enumerate(BUILTIN[source](split), start=1):
                yield f"{source}[{split}]:{index}", fields, None

        return read()

    def contents(self, source: str, split: str) -> list[tuple[str, str]]:
        return [(source, digest(FILE))]

    def size_bytes(self, source: str) -> int | None:
        return 0 if source in BUILTIN else None

    def missing(self, source: str) -> str | None:
        return None if source in BUILTIN else no_files(source)

    def holds_out(self, source: str) -> bool:
        return source in BUILTIN
