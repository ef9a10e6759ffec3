"""What config.json says of the form that a base is published in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from finetune.forms.table import FORMS

_LEFT_OUT = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Keys that list the modules which files leave in 16 bit."""


def form_of(given: Any) -> str | None:
    """The form that config.json's entry on quantization says: a key of FORMS that bases are published in, or `gguf`;
    None for none, one that is not kept here, or a damaged entry.
    """
    if not isinstance(given, Mapping) or not is_read(given) or misshapen(given):
        return None
    if given.get("quant_method") == "gguf":
        forms = given.get("modules_to_convert")
        of_gguf = {name for name, form in FORMS.items() if form.is_of_gguf}
        known = isinstance(forms, Mapping) and all(isinstance(one, str) and one in of_gguf for one in forms.values())
        return "gguf" if known else None
    return next((name for name, form in FORMS.items() if form.published and form.codec.files.states(given)), None)


def is_read(given: Mapping[str, Any]) -> bool:
    """Whether the entry is of a method that has a form which is kept here."""
    method = given.get("quant_method", "compressed-tensors")
    return method == "gguf" or any(form.published and method in form.codec.files.methods for form in FORMS.values())


def left_out(given: Mapping[str, Any], form: str) -> list[str]:
    """Names and regular expressions, as transformers reads them, for the modules that files leave in 16 bit."""
    return [] if form == "gguf" else FORMS[form].codec.files.left_out(given)


def misshapen(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key that is read here and whose value has another shape than its method writes; and that, in words."""
    for key, (fits, words) in _SHAPES.items():
        if given.get(key) is not None and not fits(given[key]):
            return key, words
    return None


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _is_size(value: Any) -> bool:
    return type(value) is int


def _is_block(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_size(size) and size > 0 for size in value)


def _are_groups(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    for group in value.values():
        weights = (group.get("weights") or {}) if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or not isinstance(group.get("format"), str | None):
            return False
        if not isinstance(weights.get("group_size"), int | None):
            return False
    return True


_NAME = (lambda value: isinstance(value, str), "a name")
_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_LEFT_OUT, (_are_names, "a list of names")),
    "modules_to_convert": (lambda value: isinstance(value, Mapping) or _are_names(value), "a table or a list of names"),
    "weight_block_size": (_is_block, "two positive integers"),
    "expert_dtype": _NAME,
    "config_groups": (_are_groups, "a table of groups of layers"),
    "group_size": (_is_size, "an integer"),
    "format": _NAME,
    "quant_algo": _NAME,
}  # fmt: skip
"""Keys that are read of the quantization that config.json states, and what each is; null and absence mean the same."""
