"""Rows with a class: a text or a conversation, and its `label`.

A text has the tokens of `tokenizer(text)`, and a conversation those of its chat template. Nothing is added, because
users of the trained classifier tokenize its inputs the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from finetune.config.field_types import unknown
from finetune.data import fields as row
from finetune.data.examples import Content, Example, RowError, Several, Text
from finetune.data.fields import Fields
from finetune.data.messages import conversation, read_messages

SEGMENT, LABEL = "text", "label"
# A class that is a number; longer ones are names.
_NUMBER = re.compile(r"-?\d{1,18}")
OPTIONAL = ("messages", "prompt", "text", "system", "tools", "functions")


def read(fields: Fields) -> Several:
    """The content of a row as its only segment, with the name of its class. Raises RowError."""
    field = next((name for name in ("messages", "prompt") if fields.get(name) is not None), "text")
    if field == "messages" or isinstance(fields.get(field), list):
        example: Example = conversation(read_messages(fields, field), fields)
    else:
        example = Text(row.text(fields, field))
    label = fields.get(LABEL)
    if type(label) is int:
        label = str(label)
    if label is None or label == "":
        raise RowError(f"`{LABEL}` is missing, the class of the row: write its name or number, or remove the row")
    if not isinstance(label, str):
        raise RowError(
            f"`{LABEL}` must be the name or the number of a class, not {row.kind_of(label)}"
            + (f" with a fraction ({label})" if isinstance(label, float) else "; write text or an integer")
        )
    row.check_encodable(label, LABEL)
    return Several({SEGMENT: example}, label=label)


def numbered(content: Content, labels: Sequence[str]) -> Content:
    """`content` with the number of its label among `labels` as a value, if it has one. Raises RowError for another."""
    if not isinstance(content, Several) or content.label is None:
        return content
    if content.label not in labels:
        raise RowError(f"`{LABEL}` is a class that no training row has: {unknown(content.label, labels)}")
    return replace(content, values={**content.values, LABEL: float(labels.index(content.label))})


def in_order(names: Iterable[str]) -> list[str]:
    """Names of classes in the order of their outputs: numbers by value, others by spelling."""
    known = sorted(names)
    return sorted(known, key=int) if all(map(_NUMBER.fullmatch, known)) else known
