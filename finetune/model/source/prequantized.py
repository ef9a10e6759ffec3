"""Bases that are published with quantized weights: which are kept in that form, and which are refused.

A job keeps MXFP4, NVFP4 and block-wise FP8 as they are (`forms.packed`), and refuses other forms before anything
else is read: it can neither train on such weights nor merge into them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config import Config, ModelSection, QuantizationSection, contradictions
from finetune.config.field_types import shortened, shown
from finetune.errors import ArtifactError, ConfigError
from finetune.model.source.locate import card

METHODS = {
    "gguf": "a GGUF file",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 by FBGEMM",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "modelopt": "ModelOpt",
    "torchao": "TorchAO",
}
"""Usual names of the values of `quant_method` in config.json; any other value is its own name."""

_ORIGINALS = {"openai/gpt-oss-20b": "unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-120b": "unsloth/gpt-oss-120b-BF16"}
"""Copies in 16 bit, made by others, of bases that their own authors publish in quantized form only."""

# config.json's key is `quantization_config`; that of MLX is `quantization`, that of early compressed-tensors the third.
_KEYS = ("quantization_config", "quantization", "compression_config")
_LEFT_OUT = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Keys that list the modules which files leave in 16 bit."""
_READ = ("gguf", "mxfp4", "fp8", "modelopt", "modelopt_fp4", "compressed-tensors")
"""Values of `quant_method` of which a form is kept."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Endings of the names of quantized copies, such as -FP8, -GPTQ-Int4, -unsloth-bnb-4bit, -quantized.w4a16.
_ENDING = re.compile(
    r"([-_.](unsloth|bnb|mlx|[48]-?bits?|u?int[48]|g?fp8|mxfp[48]|nvfp4|fp4|nf4|gptq(model)?|awq|hqq|aqlm|exl2|eetq"
    r"|auto-?round|quantized|dynamic|block|w[48]a(8|16)|g128|sym|marlin))+",
    re.IGNORECASE,
)


def form(architecture: Any) -> str | None:
    """The `quantization.kind` that weights are published in; None if in 16 bit, or in a form that is refused."""
    given = _given(architecture)
    if not isinstance(given, Mapping) or not _is_read(given) or _misshapen(given):
        return None
    if _is_nvfp4(given):
        return "nvfp4"
    method, block = given.get("quant_method"), list(given.get("weight_block_size") or ())
    # FP8 has other forms: one scale for each weight, experts in 4 bit (DeepSeek V4), quantized embeddings.
    blocks = block == [128, 128] and given.get("expert_dtype", "fp8") == "fp8" and not given.get("modules_to_convert")
    return method if method == "mxfp4" or _is_gguf(given) or (method == "fp8" and blocks) else None


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
    return {"quant_method": known, "modules_to_not_convert": _left_out(given, known), **forms}


def requantizes(quantization: QuantizationSection, architecture: Any) -> bool:
    """Whether a job trains on other values than the published ones."""
    return quantization.kind != "none" and stated(architecture, quantization) is None


def resolved(config: Config, architecture: Any) -> tuple[Config, str | None]:
    """`config` with the `quantization.kind` of its base in place of `published`, `auto` or a default, and a note if
    that is not what it says.

    Raises ConfigError for a kind that needs the base in 16 bit, and for a key that excludes the published form.
    """
    name, published, kind = config.model.name, form(architecture), config.quantization.kind
    if kind == "gguf" != published:
        raise ConfigError(f"`quantization.kind`: {name} is not a GGUF file; set a kind to quantize it to")
    default = "kind" not in config.quantization.model_fields_set or kind == "auto"
    if kind != "published" and (published is None or kind in (published, "none")):
        return config, None
    if kind != "published" and not default:
        if config.model.weights == "random":
            return config, None
        raise ConfigError(
            f"`quantization.kind`: {name} is published in {METHODS[str(published)]}, which is not quantized again to "
            f"{kind}; set `published` to keep that form, or `none` to train on its values in 16 bit"
        )
    config = config.changed({"quantization.kind": published or "none", "quantization.double": True})
    for key, message in contradictions(config):
        if "quantization.kind" in f"{key} {message}":
            raise ConfigError(f"`{key}`: {name} is published in {METHODS[str(published)]}: {message}")
    if not default:
        return config, None
    return config, f"quantization.kind: {published}, the form that `{name}` is published in"


def refuse(section: ModelSection, architecture: Any) -> None:
    """Refuse a base of which config.json, or a part of it, says that weights are quantized in a form that is not kept.

    Raises ConfigError for such a form, and ArtifactError for a value that the form's own files never have.
    """
    given = _given(architecture)
    if not given or form(architecture):
        return
    if isinstance(given, Mapping) and _is_read(given) and (field := _misshapen(given)):
        raise ArtifactError(
            f"`model.name`: config.json of {section.name} is damaged: `{field}` of its quantization is "
            f"{shown(given[field])}, not {_SHAPES[field][1]}; download the base again, or use another"
        )
    remedy = "; ".join(_remedies(section))
    raise ConfigError(
        f"`model.name`: {section.name} is published with quantized weights{_described(given)}, which cannot be trained "
        f"on or merged into here; name its 16-bit original, which `quantization.kind` then quantizes: {remedy}"
    )


def _is_read(given: Mapping[str, Any]) -> bool:
    return given.get("quant_method", "compressed-tensors") in _READ


def _misshapen(given: Mapping[str, Any]) -> str | None:
    """The first key that is read here and whose value has another shape than its method writes."""
    values = ((key, given[key]) for key in _SHAPES if given.get(key) is not None)
    return next((key for key, value in values if not _SHAPES[key][0](value)), None)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    return type(value) is int


def _is_block(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_size(size) and size > 0 for size in value)


def _are_groups(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_group, value.values()))


def _is_group(value: Any) -> bool:
    weights = (value.get("weights") or {}) if isinstance(value, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(value.get("format"), str | None):
        return False
    return isinstance(weights.get("group_size"), int | None)


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_LEFT_OUT, (_are_names, "a list of names")),
    "modules_to_convert": (lambda value: isinstance(value, Mapping) or _are_names(value), "a table or a list of names"),
    "weight_block_size": (_is_block, "two positive integers"),
    "expert_dtype": (_is_name, "a name"),
    "config_groups": (_are_groups, "a table of groups of layers"),
    "group_size": (_is_size, "an integer"),
    "format": (_is_name, "a name"),
    "quant_algo": (_is_name, "a name"),
}
"""Keys that are read of the quantization that config.json states, and what each is; null and absence mean the same."""


def _given(architecture: Any) -> Any:
    """The first entry on quantization in config.json and its parts."""
    parts = (architecture, *(getattr(architecture, name, None) for name in architecture.sub_configs))
    return next((value for part in parts for key in _KEYS if (value := getattr(part, key, None))), None)


def _is_gguf(given: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a GGUF file's folder (`gguf_base`), which transformers' own is not."""
    if given.get("quant_method") != "gguf":
        return False
    from finetune.model.source import gguf_base

    forms = given.get("modules_to_convert")
    return isinstance(forms, Mapping) and all(_is_name(form) and form in gguf_base.FORMS for form in forms.values())


def _is_nvfp4(given: Mapping[str, Any]) -> bool:
    """Whether config.json says that compressed-tensors or ModelOpt has put all linear layers but some in NVFP4.

    Not with rotated weights, other forms beside it, or inputs that are scaled before a layer (`NVFP4_AWQ`).
    """
    groups = given.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    sizes = [given.get("group_size", 16), *(each.get("group_size", 16) for each in weights)]
    if given.get("quant_method") in ("modelopt", "modelopt_fp4"):
        return given.get("quant_algo") in ("NVFP4", "W4A16_NVFP4") and set(sizes) == {16}
    formats = {given.get("format"), *(group.get("format") or given.get("format") for group in groups.values())}
    plain = not given.get("transform_config") and all(each.get("symmetric", True) for each in weights)
    targets = [group.get("targets") for group in groups.values()]
    return plain and formats == {"nvfp4-pack-quantized"} and targets == [["Linear"]] and set(sizes) == {16}


def _left_out(given: Mapping[str, Any], form: str) -> list[str]:
    """Names and regular expressions, as transformers reads them, for the modules that files leave in 16 bit.

    Of NVFP4's files, compressed-tensors' have names and, after `re:`, beginnings of them; ModelOpt's names with `*`.
    """
    if form != "nvfp4":  # MiniMax writes the second
        return list(given.get("modules_to_not_convert") or given.get("ignored_layers") or ())
    names = given.get("ignore") or given.get("exclude_modules") or ()
    return [f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name).replace(r"\*", ".*") for name in names]


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
