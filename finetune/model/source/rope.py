"""Rotary scaling: other rotary frequencies than a base was trained with, for longer rows than it was trained on."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from finetune.config import ModelSection
from finetune.errors import ConfigError
from finetune.model.source import catalog

# The wavelengths between which Llama 3.1 scales gradually, as parts of the original context (its config.json).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled(architecture: Any, section: ModelSection) -> Any:
    """The transformers config, changed in place to the scaling of `section`. Raises ConfigError if it cannot be."""
    if (scaling := section.rope_scaling) is None:
        return architecture
    text = architecture.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    why, kind = None, rope.get("rope_type", "default")
    if any(isinstance(value, dict) for value in rope.values()):
        why = "has layers with several rotary embeddings, of which one factor cannot be right"
    elif kind != "default":
        why = f"has a rotary embedding that is scaled already (`{kind}`)"
    elif not rope or "ROPE_INIT_FUNCTIONS" not in (catalog.text_code(architecture) or {}):
        why = "has no rotary embedding that transformers can scale"
    if why:
        raise ConfigError(f"`model.rope_scaling`: {section.name} {why}; remove it")
    original = text.max_position_embeddings
    rope = {**rope, **scaling.model_dump()}
    if scaling.rope_type != "linear":
        rope["original_max_position_embeddings"] = original
    if scaling.rope_type == "llama3":  # the one type whose positions include the factor in a config.json
        rope |= _LLAMA3
        text.max_position_embeddings = int(scaling.factor * original)
    text.rope_parameters = rope
    return architecture


def forget_longer_batches(model: Any) -> None:
    """Let the frequencies of a `dynamic` embedding depend on the longest row of a batch alone.

    transformers 5.24 (`dynamic_frequency_update`) keeps those of a longer batch before, until one is shorter than the
    original context: losses would depend on the order of batches, and a resumed run would not be the same.
    """

    def forget(module: nn.Module, arguments: Any, prefixes: list[str]) -> None:
        for prefix in prefixes:
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        of_types = {f"{name}_": kind for name, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        prefixes = [
            each for each, kind in of_types.items() if kind == "dynamic" and hasattr(module, f"{each}original_inv_freq")
        ]
        if prefixes:
            module.register_forward_pre_hook(functools.partial(forget, prefixes=prefixes))
