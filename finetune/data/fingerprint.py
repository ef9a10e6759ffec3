"""Fingerprints of a tokenizer with its template, and of rows: stored with weights, compared before their use.

Weights are trained for one tokenization, and an adapter for one base. With any other the answers are worse, without an
error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.config import ModelSection
from finetune.errors import ArtifactError
from finetune.storage import records
from finetune.storage.files import write_json

_FILE = "fingerprint.json"
# Digits that an error names, of 64: enough to tell two apart, few enough to read.
_DIGITS = 16


def of(tokenizer: Any) -> str:
    """sha256 in hex of what decides a row's tokens: vocabulary, rules, special tokens and chat template."""
    if hasattr(tokenizer, "backend_tokenizer"):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        # How the last call padded and cut is kept there too, and is none of the tokenizer's own.
        del rules["truncation"], rules["padding"]
    else:
        rules = tokenizer.get_vocab()
    parts = [rules, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def of_rows(rows: Any) -> str:
    """sha256 in hex of the tokens and labels of a prepared split, in their order; a second for some 10^9 tokens."""
    digest = hashlib.sha256(str(len(rows)).encode())
    for table in rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(batch_size=10_000):
        for column in table.columns:
            lists = column.combine_chunks()
            for numbers in (lists.value_lengths(), lists.flatten()):
                digest.update(numbers.to_numpy(zero_copy_only=False).astype("<i4", copy=False).tobytes())
    return digest.hexdigest()


def save(tokenizer: Any, base: str | None, folder: Path) -> None:
    """Write the tokenizer and its fingerprint beside the weights in `folder`, with the identity of their base."""
    tokenizer.save_pretrained(str(folder))
    write_json(folder / _FILE, {"tokenizer": of(tokenizer), "base": base})


def check(tokenizer: Any, folder: Path) -> None:
    """Raise ArtifactError where the weights in `folder` were trained with another tokenizer or chat template.

    A folder without a fingerprint passes: it holds nothing yet, or comes from elsewhere.
    """
    if (kept := _kept(folder)) is None:
        return
    then, now = kept["tokenizer"], of(tokenizer)
    if then != now:
        raise ArtifactError(
            f"{folder} was trained with another tokenizer or chat template: fingerprint {_digits(then)} then, "
            f"{_digits(now)} now. The files it was trained with are in that folder: copy them back to where "
            "`model.tokenizer` or `model.name` points, or set `model.revision` to the commit of then; else train again"
        )


def check_base(section: ModelSection, now: str | None, folder: Path, note: Callable[[str], None]) -> None:
    """Raise ArtifactError where the weights in `folder` were trained on another base than that of `section`, whose
    identity is `now` (None where that is not known).

    What cannot be compared is noted.
    """
    kept = _kept(folder)
    then = kept.get("base") if kept else None
    if section.weights == "random":
        note(f"{folder} was trained on random weights, which were not kept: the base has other ones now")
    elif now is None:
        note(f"the files of {section.name} are not at hand, so whether {folder} was trained on them is not known")
    elif then is None:
        note(
            f"{folder} does not say which base it was trained on, as earlier versions did not: whether that was "
            f"{section.name} as it is now is not known"
        )
    elif then != now:
        raise ArtifactError(
            f"{folder} was trained on another base: config or weights of {section.name} have changed since (identity "
            f"{_digits(then)} then, {_digits(now)} now). Put its files back, or set `model.revision` in config.yaml to "
            "the commit of then; else train again"
        )


def _kept(folder: Path) -> records.Fingerprint | None:
    """What was saved beside the weights in `folder`; None where nothing was. Raises ArtifactError for damage."""
    file = folder / _FILE
    return records.read(file, records.FINGERPRINT) if records.exists(file) else None


def _digits(identity: str) -> str:
    return ascii(identity.rpartition(":")[2][:_DIGITS])[1:-1]
