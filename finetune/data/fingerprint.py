"""The fingerprints of a tokenizer with its template, and of rows: kept with weights, compared before they are used.

Weights have learnt one spelling of text as tokens. With another they still answer, only worse, and nothing says why.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from finetune import records
from finetune.errors import ArtifactError
from finetune.rundir import write_json

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


def save(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer and its fingerprint beside the weights in `folder`."""
    tokenizer.save_pretrained(str(folder))
    write_json(folder / _FILE, {"tokenizer": of(tokenizer)})


def check(tokenizer: Any, folder: Path) -> None:
    """Raise ArtifactError where the weights in `folder` were trained with another tokenizer or chat template.

    A folder without a fingerprint passes: it holds nothing yet, or comes from elsewhere.
    """
    file = folder / _FILE
    if not records.exists(file):
        return
    then = records.read(file, records.FINGERPRINT)["tokenizer"]
    now = of(tokenizer)
    if then != now:
        raise ArtifactError(
            f"{folder} was trained with another tokenizer or chat template: fingerprint {then[:_DIGITS]} then, "
            f"{now[:_DIGITS]} now. The files it was trained with are in that folder: copy them back to where "
            "`model.tokenizer` or `model.name` points, or set `model.revision` to the commit of then; else train again"
        )
