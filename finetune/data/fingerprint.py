"""Fingerprints of a tokenizer with its chat template, and of rows: saved beside weights, checked before their use.

Weights are trained for one tokenization, and an adapter for one base model. Any other gives worse answers without an
error.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.config import ModelSection
from finetune.data.encoded import MEDIA, MEDIA_SIZES, columns
from finetune.errors import ArtifactError
from finetune.model.source import file_hashes
from finetune.storage import records
from finetune.storage.files import as_os_errors, write_json

_FILE, _ADAPTER = "fingerprint.json", "adapter_model.safetensors"
# Hex digits shown, of 64: enough to tell two fingerprints apart in an error message.
_DIGITS = 16
_DIGITS_OF_IMAGE = 8
# The hash depends on it, since the lengths of so many rows come before their values.
_ROWS_AT_ONCE = 10_000


def of(tokenizer: Any) -> str:
    """sha256 (hex) of everything that determines a row's tokens: vocabulary, rules, special tokens, chat template."""
    others = json.dumps([tokenizer.special_tokens_map, tokenizer.chat_template])
    if hasattr(tokenizer, "backend_tokenizer"):
        return _of_backend(tokenizer.backend_tokenizer.to_str(), others)
    return _sha256(tokenizer.get_vocab(), others)


@functools.lru_cache(maxsize=1)  # a run asks several times, and sorting a large vocabulary takes half a second
def _of_backend(text: str, others: str) -> str:
    rules = json.loads(text)
    # These reflect the last call rather than the tokenizer.
    del rules["truncation"], rules["padding"]
    return _sha256(rules, others)


def _sha256(rules: dict[str, Any], others: str) -> str:
    return hashlib.sha256(json.dumps([rules, *json.loads(others)], sort_keys=True).encode()).hexdigest()


def of_rows(rows: Any, *, images: bool = True) -> str:
    """SHA-256 (hex) of the columns that a prepared split trains on, in order; takes a second for 10^9 tokens.

    Without `images` it is that of any rows with the same tokens, of which images may have others.
    """
    import numpy as np
    import pyarrow

    digest = hashlib.sha256(str(len(rows)).encode())
    trained = rows.table.select([name for name in columns(rows) if images or name not in (MEDIA, MEDIA_SIZES)])
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        for column in trained.slice(at, _ROWS_AT_ONCE).columns:
            if pyarrow.types.is_list(column.type) and pyarrow.types.is_struct(column.type.value_type):  # images
                for each in column.chunks:
                    digest.update(json.dumps([each.value_lengths().to_pylist(), _digests(each)]).encode())
                continue
            # Chunk by chunk: joined, lists could have more values than their offsets can number.
            parts, lists = [column.chunks], pyarrow.types.is_list(column.type)
            if lists:
                parts = [[each.value_lengths() for each in column.chunks], [each.flatten() for each in column.chunks]]
            for each in itertools.chain.from_iterable(parts):
                numbers = np.from_dlpack(each)  # `to_numpy` imports pandas
                kind = ("<f4" if numbers.dtype.kind == "f" else "<i4") if lists else "<f8"
                digest.update(numbers.astype(kind, copy=False).tobytes())
    return digest.hexdigest()


def of_images(rows: Any) -> records.ImageHashes:
    """The hash of rows that may have images without those, and the digest of each image, cut to tell which differ."""
    digests = itertools.chain.from_iterable(map(_digests, rows.table.column(MEDIA).chunks))
    return {"rows": of_rows(rows, images=False), "images": "".join(each[:_DIGITS_OF_IMAGE] for each in digests)}


def _digests(images: Any) -> list[str]:
    """The digest of each image of a chunk of their column, without their bytes."""
    digests: list[str] = images.flatten().field("digest").to_pylist()
    return digests


def changed_images(before: records.ImageHashes, now: records.ImageHashes) -> list[int] | None:
    """Which images are others than `before`, of the same rows; None if the rows are others, too."""
    if before["rows"] != now["rows"] or len(before["images"]) != len(now["images"]):
        return None
    each = range(0, len(now["images"]), _DIGITS_OF_IMAGE)
    cut = ([hashes["images"][at : at + _DIGITS_OF_IMAGE] for at in each] for hashes in (before, now))
    return [number for number, (old, new) in enumerate(zip(*cut, strict=True)) if old != new]


def save_tokenizer(tokenizer: Any, base: str | None, folder: Path) -> None:
    """Write the tokenizer, its fingerprint, the identity of the base model and the hash of an adapter in `folder`.

    Raises OSError or MachineError if writing fails.
    """
    with as_os_errors(folder):
        tokenizer.save_pretrained(str(folder))
    weights = {"weights": file_hashes.sha256(file)} if (file := folder / _ADAPTER).is_file() else {}
    write_json(folder / _FILE, {"tokenizer": of(tokenizer), "base": base, **weights})


def check(tokenizer: Any, folder: Path) -> None:
    """Raise ArtifactError if the weights in `folder` have the fingerprint of another tokenizer or chat template."""
    if (kept := saved_in(folder)) is None:
        return
    then, now = kept["tokenizer"], of(tokenizer)
    if then != now:
        raise ArtifactError(
            f"{folder} was trained with another tokenizer or chat template: fingerprint {_digits(then)} then, "
            f"{_digits(now)} now. The original files are in that folder: set `model.tokenizer` to it (for a finished "
            "run in its config.yaml), copy them back to where `model.tokenizer` or `model.name` points, or set "
            "`model.revision` to the original commit; else train again"
        )


def check_base(section: ModelSection, now: str | None, folder: Path, note: Callable[[str], None]) -> None:
    """Raise ArtifactError if the weights in `folder` were trained on another base model than that of `section`, whose
    identity is `now` (None if unknown).

    Calls `note` with the reason if the two cannot be compared.
    """
    kept = saved_in(folder)
    compare_base(section, now, kept.get("base") if kept else None, folder, note)


def compare_base(
    section: ModelSection, now: str | None, then: str | None, folder: Path, note: Callable[[str], None]
) -> None:
    """As `check_base`, with `then`, the identity of the base that `folder` was trained on (None if unknown)."""
    if section.weights == "random":
        note(f"{folder} was trained on random weights, which were not saved: the base now has different ones")
    elif now is None:
        note(f"the files of {section.name} are not available, so whether {folder} was trained on them is unknown")
    elif then is None:
        note(
            f"{folder} does not record its base model (an earlier version wrote it), so whether it was trained on "
            f"{section.name} as it is now is unknown"
        )
    elif then != now:
        parts = "config or weights" if section.vision == "none" else "config, weights or image processor"
        raise ArtifactError(
            f"{folder} was trained on another base: {parts} of {section.name} have changed since (identity "
            f"{_digits(then)} then, {_digits(now)} now). Restore its files, or set `model.revision` in config.yaml to "
            "the original commit; else train again"
        )


def saved_in(folder: Path) -> records.Fingerprint | None:
    """The fingerprint saved in `folder`, or None. Raises ArtifactError for a damaged file."""
    return records.find(folder / _FILE, records.FINGERPRINT)


def _digits(identity: str) -> str:
    return ascii(identity.rpartition(":")[2][:_DIGITS])[1:-1]
