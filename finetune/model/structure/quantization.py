"""Quantization of frozen weights: the forms of `finetune.forms` that a base can be held in, and other kinds."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config import QuantizationSection
from finetune.forms import FORMS, LEAST_FIRST


@dataclass(frozen=True)
class Quantization:
    """A kind of quantization with its arguments for BitsAndBytesConfig (None: another library's, or unquantized), and
    the keys that it `ignores`. `packed`: the weights are in forms that have a codec.
    """

    help: str
    arguments: Mapping[str, Any] | None = None
    packed: bool = False
    ignores: tuple[str, ...] = ("double",)

    @property
    def four_bit(self) -> bool:
        return bool(self.arguments and self.arguments.get("load_in_4bit"))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


QUANTIZATIONS: dict[str, Quantization] = {
    **{
        name: Quantization(
            form.held,
            form.arguments,
            packed=form.arguments is None,
            ignores=() if "load_in_4bit" in (form.arguments or {}) else ("double",),
        )
        for name, form in FORMS.items()
        if form.held
    },
    "gguf": Quantization("each weight as in the GGUF file that the base is", packed=True),
    "published": Quantization(
        f"as in the base's files: {_listed(name for name, form in FORMS.items() if form.published)}, `gguf` or `none`"
    ),
    "none": Quantization("the training precision"),
    "auto": Quantization(
        f"the form that the base is published in; else the first of {_listed(LEAST_FIRST[:-1])} and "
        f"`{LEAST_FIRST[-1]}` with which the forecast says that the job fits",
        ignores=(),
    ),
}


def changes_to(kind: str) -> dict[str, Any]:
    """The changes of a config to this kind of quantization, with the defaults of the keys that it ignores."""
    defaults = QuantizationSection().model_dump(include=set(QUANTIZATIONS[kind].ignores))
    return {f"quantization.{key}": value for key, value in {**defaults, "kind": kind}.items()}


def library_config(section: QuantizationSection, compute_dtype: Any, published: Any = None) -> Any | None:
    """transformers' quantization config, or None if weights are neither quantized nor `published` in a packed form.

    `published` is what config.json says of that form, which `quantization.kind: none` decodes (`prequantized.stated`).
    """
    from transformers import BitsAndBytesConfig

    kind = QUANTIZATIONS[section.kind]
    if kind.packed or published:
        given = published or {"quant_method": section.kind}
        form = given["quant_method"]
        # Arguments passed to transformers 5.24 replace what config.json says, even with None.
        kept = given.get("modules_to_not_convert")
        config = config_class(form)
        config = functools.partial(config, quant_method=form, dequantize=not kind.packed, modules_to_not_convert=kept)
        # transformers' config has no other place for the forms of single weights.
        return config(modules_to_convert=given["modules_to_convert"]) if form == "gguf" else config()
    if kind.arguments is None:
        return None
    if not kind.four_bit:
        return BitsAndBytesConfig(**kind.arguments)
    return BitsAndBytesConfig(
        **kind.arguments, bnb_4bit_use_double_quant=section.double, bnb_4bit_compute_dtype=compute_dtype
    )


def config_class(form: str) -> Any:
    """transformers' class for the config of a packed form: its own if it has one, else that of FP8."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    known = FORMS.get(form)
    of_library = known is not None and known.module and known.codec.files.of_library
    return AUTO_QUANTIZATION_CONFIG_MAPPING[form] if of_library else FineGrainedFP8Config
