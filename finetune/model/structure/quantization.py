"""Quantization of frozen weights. A new kind is one entry in QUANTIZATIONS."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from finetune.config import QuantizationSection


@dataclass(frozen=True)
class Quantization:
    """A kind of quantization with its arguments for BitsAndBytesConfig (None: another library's, or unquantized), and
    the keys that it `ignores`.

    `packed`: the weights are of a form of `packed.FORMS`, or by a recipe of `recipes.RECIPES` of several.
    """

    help: str
    arguments: dict[str, Any] | None
    four_bit: bool = False
    packed: bool = False
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
    "mxfp4": Quantization(
        "4-bit floats in blocks of 32 with a power of two as scale (OCP MX), as gpt-oss is published", None,
        packed=True, ignores=("double",),
    ),
    "nvfp4": Quantization(
        "4-bit floats in blocks of 16, each with a scale in 8 bits (NVIDIA), as compressed-tensors and ModelOpt write",
        None, packed=True, ignores=("double",),
    ),
    "fp8": Quantization(
        "8-bit floats in blocks of 128 x 128, as DeepSeek and Qwen's FP8 models are published", None,
        packed=True, ignores=("double",),
    ),
    **{
        kind: Quantization(f"{words}, as in a GGUF file of llama.cpp", None, packed=True, ignores=("double",))
        for kind, words in (
            ("q4_k_m", "4-bit integers with two levels of scales, and 6 bit in half of the layers"),
            ("q5_k_m", "5-bit integers with two levels of scales, and 6 bit in half of the layers"),
            ("q6_k", "6-bit integers with two levels of scales"),
            ("q8_0", "8-bit integers in blocks of 32"),
            ("q4_0", "4-bit integers in blocks of 32"),
            ("iq4_xs", "4-bit codes of a table of values, with two levels of scales"),
        )
    },
    "int4": Quantization(
        "4-bit integers in blocks of 128, as compressed-tensors writes", None, packed=True, ignores=("double",)
    ),
    "gguf": Quantization(
        "each weight as in the GGUF file that the base is", None, packed=True, ignores=("double",)
    ),
    "published": Quantization(
        "as in the base's files: `mxfp4`, `nvfp4`, `fp8`, `gguf` or `none`", None, ignores=("double",)
    ),
    "none": Quantization("the training precision", None, ignores=("double",)),
    "auto": Quantization(
        "the form that the base is published in; else the first of `none`, `int8`, `fp8` and `nf4` with which the "
        "forecast says that the job fits", None,
    ),
}  # fmt: skip

LEAST_FIRST = ("none", "int8", "fp8", "nf4")
"""The kinds that `auto` chooses from, by the error of a normally distributed weight (0.8%, 2.6% and 9%)."""


def changes_to(kind: str) -> dict[str, Any]:
    """The changes of a config to this kind of quantization, with the defaults of the keys that it ignores."""
    defaults = QuantizationSection().model_dump(include=set(QUANTIZATIONS[kind].ignores))
    return {f"quantization.{key}": value for key, value in {**defaults, "kind": kind}.items()}


def library_config(section: QuantizationSection, compute_dtype: Any, published: Any = None) -> Any | None:
    """transformers' quantization config, or None if weights are neither quantized nor `published` in a packed form.

    `published` is what config.json says of that form, which `quantization.kind: none` decodes (`prequantized.stated`).
    """
    import transformers

    from finetune.forms import packed

    kind = QUANTIZATIONS[section.kind]
    if kind.packed or published:
        given = published or {"quant_method": section.kind}
        form = given["quant_method"]
        # Arguments passed to transformers 5.23 replace what config.json says, even with None.
        kept = given.get("modules_to_not_convert")
        known = packed.FORMS.get(form)
        config = getattr(transformers, (known and known.config) or "FineGrainedFP8Config")
        config = functools.partial(config, quant_method=form, dequantize=not kind.packed, modules_to_not_convert=kept)
        # transformers' config has no other place for the forms of single weights.
        return config(modules_to_convert=given["modules_to_convert"]) if form == "gguf" else config()
    if kind.arguments is None:
        return None
    if not kind.four_bit:
        return transformers.BitsAndBytesConfig(**kind.arguments)
    return transformers.BitsAndBytesConfig(
        **kind.arguments, bnb_4bit_use_double_quant=section.double, bnb_4bit_compute_dtype=compute_dtype
    )
