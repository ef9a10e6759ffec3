"""A tiny model of every architecture that transformers has a causal language model of, made from its own defaults."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from finetune.model import small_copy

WORDS = small_copy.WORDS
model = small_copy.model_of

# Values without which a default config has no model.
_GIVEN = {"emu3": {"vocabulary_map": {"<|extra_200|>": 5, "<image>": 6, "<|visual token 000000|>": 7}}}


def types() -> list[str]:
    """The `model_type` of each."""
    return list(dict.fromkeys(config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING))


def config(model_type: str) -> Any:
    """A small copy of the architecture's default config, with all that is beside the text model."""
    whole = CONFIG_MAPPING[model_type](**_GIVEN.get(model_type, {}))
    for name, part in type(whole).sub_configs.items():
        if getattr(whole, name, None) is None and getattr(part, "model_type", None):
            setattr(whole, name, part())
    return small_copy.config_of(whole)
