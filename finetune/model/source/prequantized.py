"""Bases that are published with quantized weights: which are kept in that form, and which are refused.

A job keeps the forms of `finetune.forms` that bases are published in, and refuses others before anything else is read:
it can neither train on such weights nor merge into them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config import Config, ModelSection, QuantizationSection, contradictions
from finetune.config.field_types import shortened, shown
from finetune.errors import ArtifactError, ConfigError
from finetune.forms import FORMS, form_of, is_read, left_out, misshapen
from finetune.model.source.locate import card

METHODS = {
    "gguf": "a GGUF file",
    **{name: form.published for name, form in FORMS.items() if form.published},
    "fbgemm_fp8": "FP8 by FBGEMM",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "modelopt": "ModelOpt",
    "torchao": "TorchAO",
}
"""Usual names of forms and of values of `quant_method` in config.json; any other value is its own name."""

_ORIGINALS = {"openai/gpt-oss-20b": "unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-120b": "unsloth/gpt-oss-120b-BF16"}
"""Copies in 16 bit, made by others, of bases that their own authors publish in quantized form only."""

# config.json's key is `quantization_config`; that of MLX is `quantization`, that of early compressed-tensors the third.
_KEYS = ("quantization_config", "quantization", "compression_config")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PUBLISHED = "|".join(name for name, form in FORMS.items() if form.published)
# Endings of the names of quantized copies, such as -FP8, -GPTQ-Int4, -unsloth-bnb-4bit, -quantized.w4a16.
_ENDING = re.compile(
    rf"([-_.](unsloth|bnb|mlx|[48]-?bits?|u?int[48]|gfp8|mxfp8|fp4|nf4|gptq(model)?|awq|hqq|aqlm|exl2|eetq|{_PUBLISHED}"
    r"|auto-?round|quantized|dynamic|block|w[48]a(8|16)|g128|sym|marlin))+",
    re.IGNORECASE,
)


def form(architecture: Any) -> str | None:
    """The `quantization.kind` that weights are published in; None if in 16 bit, or in a form that is refused."""
    return form_of(_given(architecture))


def main_form(architecture: Any) -> str | None:
    """The form (of `forms.packed`) that most weights are published in; None if that is 16 bit."""
    if (known := form(architecture)) != "gguf":
        return known
    forms = Counter(_given(architecture)["modules_to_convert"].values())
    return forms.most_common(1)[0][0].removeprefix("gguf_") if forms else None


def stated(architecture: Any, quantization: QuantizationSection) -> Mapping[str, Any] | None:
    """What config.json says of the form that weights are published in, if the job keeps it or decodes it to 16 bit.

    It is said as of FP8, whatever the form: `quant_method`, and the modules that are left in 16 bit; of a GGUF file
    also the form of each weight. Nothing else in that entry reaches transformers.
    """
    if not (known := form(architecture)) or quantization.kind not in (known, "none"):
        return None
    given: Mapping[str, Any] = _given(architecture)
    forms = {"modules_to_convert": given["modules_to_convert"]} if known == "gguf" else {}
    return {"quant_method": known, "modules_to_not_convert": left_out(given, known), **forms}


def requantizes(quantization: QuantizationSection, architecture: Any) -> bool:
    """Whether a job trains on other values than the published ones."""
    return quantization.kind != "none" and stated(architecture, quantization) is None


def kept(config: Config, architecture: Any) -> tuple[dict[str, Any], str | None]:
    """The changes of `config` that keep its base in the form it is published in, for a `quantization.kind` that is
    `published`, `auto` or a default; and a note if that is not what the config says.

    Raises ConfigError for a kind that needs the base in 16 bit, and for a key that excludes the published form.
    """
    name, published, kind = config.model.name, form(architecture), config.quantization.kind
    if kind == "gguf" != published:
        raise ConfigError(f"`quantization.kind`: {name} is not a GGUF file; set a kind to quantize it to")
    default = "kind" not in config.quantization.model_fields_set or kind == "auto"
    if kind != "published" and (published is None or kind in (published, "none")):
        return {}, None
    if kind != "published" and not default:
        if config.model.weights == "random":
            return {}, None
        raise ConfigError(
            f"`quantization.kind`: {name} is published in {METHODS[str(published)]}, which is not quantized again to "
            f"{kind}; set `published` to keep that form, or `none` to train on its values in 16 bit"
        )
    changes = {"quantization.kind": published or "none", "quantization.double": True}
    for key, message in contradictions(config, changes):
        if "quantization.kind" in f"{key} {message}":
            raise ConfigError(f"`{key}`: {name} is published in {METHODS[str(published)]}: {message}")
    note = f"quantization.kind: {published}, the form that `{name}` is published in" if default else None
    return changes, note


def refuse(section: ModelSection, architecture: Any) -> None:
    """Refuse a base of which config.json, or a part of it, says that weights are quantized in a form that is not kept.

    Raises ConfigError for such a form, and ArtifactError for a value that the form's own files never have.
    """
    given = _given(architecture)
    if not given or form(architecture):
        return
    if isinstance(given, Mapping) and is_read(given) and (wrong := misshapen(given)):
        field, expected = wrong
        raise ArtifactError(
            f"`model.name`: config.json of {section.name} is damaged: `{field}` of its quantization is "
            f"{shown(given[field])}, not {expected}; download the base again, or use another"
        )
    remedy = "; ".join(_remedies(section))
    raise ConfigError(
        f"`model.name`: {section.name} is published with quantized weights{_described(given)}, which cannot be trained "
        f"on or merged into here; name its 16-bit original, which `quantization.kind` then quantizes: {remedy}"
    )


def _given(architecture: Any) -> Any:
    """The first entry on quantization in config.json and its parts."""
    parts = (architecture, *(getattr(architecture, name, None) for name in architecture.sub_configs))
    return next((value for part in parts for key in _KEYS if (value := getattr(part, key, None))), None)


def _described(given: Any) -> str:
    """In parentheses, the method, bits and format, as far as config.json says them."""
    values = given if isinstance(given, Mapping) else {}
    bits = next((bits for bits in (4, 8) if values.get(f"load_in_{bits}bit")), values.get("bits"))
    method = values.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in values else None)
    form = values.get("format") or values.get("quant_algo")
    said = [METHODS.get(str(method).lower(), method), isinstance(bits, int) and f"{bits} bit", form]
    words = ", ".join(shortened(one, 60) for one in said if one and isinstance(one, str))
    return f" ({words})" if words else ""


def _remedies(section: ModelSection) -> Iterator[str]:
    """Where the user may find an unquantized base, in words."""
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
