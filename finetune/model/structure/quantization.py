"""Quantization of frozen weights. A new kind is one entry in QUANTIZATIONS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.config import QuantizationSection


@dataclass(frozen=True)
class Quantization:
    """A kind of quantization with its arguments for BitsAndBytesConfig (None: unquantized), and the keys that it
    `ignores`.
    """

    help: str
    arguments: dict[str, Any] | None
    four_bit: bool = False
    ignores: tuple[str, ...] = ()


QUANTIZATIONS: dict[str, Quantization] = {
    "nf4": Quantization(
        "4-bit NormalFloat in blocks of 64", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, four_bit=True
    ),
    "fp4": Quantization(
        "4-bit float in blocks of 64", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, four_bit=True
    ),
    # A threshold above 0 separates outlier columns in every forward pass. A frozen base under an adapter does not need
    # that, and it makes the memory of a step depend on the data (arXiv 2208.07339, section 3.2).
    "int8": Quantization(
        "8-bit integers, one scale per row", {"load_in_8bit": True, "llm_int8_threshold": 0.0}, ignores=("double",)
    ),
    "none": Quantization("the training precision", None, ignores=("double",)),
}


def bitsandbytes_config(section: QuantizationSection, compute_dtype: Any) -> Any | None:
    """The BitsAndBytesConfig for transformers, or None if the base is not quantized."""
    from transformers import BitsAndBytesConfig

    kind = QUANTIZATIONS[section.kind]
    if kind.arguments is None:
        return None
    if not kind.four_bit:
        return BitsAndBytesConfig(**kind.arguments)
    return BitsAndBytesConfig(
        **kind.arguments, bnb_4bit_use_double_quant=section.double, bnb_4bit_compute_dtype=compute_dtype
    )
