"""The built-in rows `builtin:python_docs` and `builtin:python_pairs`: questions about Python's standard library.

Their file comes with the package; `data/build_python_docs.py` made it of the docstrings of one version of Python.
"""

from __future__ import annotations

import gzip
import json
from typing import Any, Literal

from finetune.storage.files import builtin

Split = Literal["train", "eval"]

FILE = builtin("python_docs.jsonl.gz")


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
