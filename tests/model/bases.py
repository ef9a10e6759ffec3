"""Bases as training loads them, and the operators that they run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config import ModelSection, QuantizationSection
from finetune.model.base import load_architecture, load_base


def loaded(
    kind: str | QuantizationSection = "none",
    name: str | Path = "builtin:tiny-llama",
    *,
    weights: str = "pretrained",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    placement: Any = None,
) -> Any:
    """A base in a kind of quantization, on the CPU."""
    section = ModelSection(name=str(name), weights=weights)
    quantization = QuantizationSection(kind=kind) if isinstance(kind, str) else kind
    return load_base(
        section, quantization, load_architecture(section), attention=attention, dtype=dtype,
        device=torch.device("cpu"), placement=placement,
    )  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts the calls of each operator by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))
