"""Packed weights in a folder of safetensors files: bytes under a weight's name, scales under another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from finetune.model.source import file_hashes
from finetune.model.structure import packed
from finetune.storage import weight_files


def scales_of(name: str) -> str:
    """The name of the scales of a weight."""
    return f"{name}.scales"


def digest(folder: Path) -> str:
    """SHA-256 (hex) of the files in `folder`. Raises OSError."""
    files = [(file.name, file_hashes.sha256(file)) for file in sorted(folder.glob("*" + weight_files.SUFFIX))]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


class PackedFiles:
    """The packed weights in the files of `folder`."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*" + weight_files.SUFFIX))
        self._file_of = {name: file for file in files for name in weight_files.shapes(file)}

    def __contains__(self, name: str) -> bool:
        return scales_of(name) in self._file_of

    def read(self, name: str, how: packed.Packing, device: torch.device) -> nn.Parameter:
        """The weight `name`, packed as `how` says but for its scales, in memory of its own."""
        with safe_open(self._file_of[name], framework="pt") as stored:
            codes, scales = (stored.get_tensor(one).to(device, copy=True) for one in (name, scales_of(name)))
        return packed.packed(codes, replace(how, scales=scales))
