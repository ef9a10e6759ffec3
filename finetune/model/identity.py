"""Whether a base is still the same one: a hash of its files that is taken in a moment, at each start of a run."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from finetune.config import ModelSection
from finetune.errors import FinetuneError
from finetune.model.locate import weights_directory
from finetune.weight_files import HEADER_BYTES, SUFFIX

# Another training of the same base has files of the same names, sizes and headers, and other numbers everywhere.
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def of_base(section: ModelSection) -> str | None:
    """sha256 in hex of config.json and, of each weight file, its name, size, header and samples of its numbers.

    None for random weights, which no file holds, and for a base that is not here yet.
    """
    if section.weights == "random":
        return None
    try:
        folder = weights_directory(section.name, section.revision)
    except FinetuneError:
        return None
    parts = [hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()]
    for file in sorted(folder.glob("*" + SUFFIX)):
        parts += [file.name, str(file.stat().st_size), _sampled(file)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _sampled(file: Path) -> str:
    digest, size = hashlib.sha256(), file.stat().st_size
    with open(file, "rb") as stored:
        start = stored.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        digest.update(stored.read(min(header_bytes, HEADER_BYTES)))
        for number in range(_SAMPLES):
            stored.seek(8 + header_bytes + (size - 8 - header_bytes) * number // _SAMPLES if header_bytes < size else 0)
            digest.update(stored.read(_SAMPLE_BYTES))
    return digest.hexdigest()
