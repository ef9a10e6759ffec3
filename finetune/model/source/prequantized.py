"""Refuses bases that are published with quantized weights, before anything else is read.

A job quantizes the 16-bit weights of its base while loading them. It can neither train on weights that are packed
already nor merge into them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config import ModelSection
from finetune.config.field_types import shortened
from finetune.errors import ConfigError
from finetune.model.source.locate import card

METHODS = {
    "mxfp4": "MXFP4",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 by FBGEMM",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "modelopt": "ModelOpt",
    "torchao": "TorchAO",
}
"""Usual names of the values of `quant_method` in config.json; any other value is its own name."""

_ORIGINALS = {
    "openai/gpt-oss-20b": "unsloth/gpt-oss-20b-BF16",
    "openai/gpt-oss-120b": "unsloth/gpt-oss-120b-BF16",
}
"""Copies in 16 bit, made by others, of bases that their own authors publish in quantized form only."""

# config.json's key is `quantization_config`; that of MLX is `quantization`, that of early compressed-tensors the third.
_KEYS = ("quantization_config", "quantization", "compression_config")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What the names of quantized copies end in, such as -FP8, -GPTQ-Int4, -unsloth-bnb-4bit, -quantized.w4a16.
_ENDING = re.compile(
    r"([-_.](unsloth|bnb|mlx|[48]-?bits?|u?int[48]|g?fp8|mxfp[48]|nvfp4|fp4|nf4|gptq(model)?|awq|hqq|aqlm|exl2|eetq"
    r"|auto-?round|quantized|dynamic|block|w[48]a(8|16)|g128|sym|marlin))+",
    re.IGNORECASE,
)


def refuse(section: ModelSection, architecture: Any) -> None:
    """Raise ConfigError if the config.json of the base, or a part of it, says that its weights are quantized."""
    parts = (architecture, *(getattr(architecture, name, None) for name in architecture.sub_configs))
    given = next((value for part in parts for key in _KEYS if (value := getattr(part, key, None))), None)
    if not given:
        return
    remedy = "; ".join(_remedies(section))
    raise ConfigError(
        f"`model.name`: {section.name} is published with quantized weights{_described(given)}, which cannot be trained "
        f"on or merged into here; name its 16-bit original, which `quantization.kind` then quantizes: {remedy}"
    )


def _described(given: Any) -> str:
    """In parentheses, the method, bits and format, as far as config.json says them."""
    values = given if isinstance(given, Mapping) else {}
    bits = next((bits for bits in (4, 8) if values.get(f"load_in_{bits}bit")), values.get("bits"))
    method = values.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in values else None)
    said = [METHODS.get(str(method).lower(), method), isinstance(bits, int) and f"{bits} bit", values.get("format")]
    words = ", ".join(shortened(one, 60) for one in said if one and isinstance(one, str))
    return f" ({words})" if words else ""


def _remedies(section: ModelSection) -> Iterator[str]:
    """Where an unquantized base may be found."""
    named = card(section).get("base_model")
    named = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    named = [name for name in named if isinstance(name, str) and _HUB_NAME.fullmatch(name) and name != section.name]
    stem = Path(section.name).name
    if copy := _ORIGINALS.get(section.name):
        yield f"`{copy}` is a copy in 16 bit, made by others"
    elif named:
        yield f"its model card names `{named[0]}` as its base"
    elif (ending := _ENDING.search(stem)) and ending.start() and ending.end() == len(stem):
        yield f"by its name that may be `{section.name.removesuffix(ending[0])}`"
    else:
        yield "the hub may have a copy in 16 bit, often with `BF16` in its name"
    if Path(section.name).is_dir():
        yield "if these weights are in 16 bit after all, remove that key from config.json"
