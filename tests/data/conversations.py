"""Messages in short, and encoded rows as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.data.encoded import IGNORE, Encoded, Segment
from finetune.data.examples import Message

TEMPLATES = Path(__file__).parent / "templates"


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


TWO_TURNS = [system("Be brief."), user("Hi"), assistant("Hello there."), user("Why?"), assistant("Because so.")]


def shown(encoded: Encoded | Segment, tokenizer: Any) -> str:
    """The tokens in a row, trained ones in brackets, special ones shortened to `<` (start), `>` (end) and `_` (pad)."""
    short = {"<|im_start|>": "<", "<|im_end|>": ">", "<|pad|>": "_", "\n": "/"}
    assert len(encoded.input_ids) == len(encoded.labels)
    parts = []
    for token, label in zip(encoded.input_ids, encoded.labels, strict=True):
        text = tokenizer.convert_ids_to_tokens(token)
        assert label in (IGNORE, token)
        parts.append(short.get(text, text) if label == IGNORE else f"[{short.get(text, text)}]")
    return "".join(parts)


def trained_tokens(encoded: Encoded | Segment) -> list[int]:
    return [label for label in encoded.labels if label != IGNORE]


def trained_text(encoded: Encoded | Segment, tokenizer: Any) -> str:
    return str(tokenizer.decode(trained_tokens(encoded), skip_special_tokens=False))
