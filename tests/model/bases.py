"""Bases as training loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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
