"""The architecture facts of well-known models, so that building and forecasting them needs no network.

`catalog.json` holds, by hub name, the fields of the hub's `config.json` that define the architecture, in the form of
transformers 5, and the published number of parameters with its source; the tests compare that with the built model. An
alias is another checkpoint of the same shapes, such as the instruct variant, and lists the facts in which it differs:
the end-of-text token and, for Qwen, the context length and the norms' epsilon. Initializer, dropout, cache settings and
dtype are left to the library, and so is the kind of each layer where it has the published pattern.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class CatalogEntry:
    """The facts of one model: keyword arguments of the transformers configuration, to be treated as read-only.

    `parameters` counts tied weights once; `source` says where that number was published. `note` is for readers: the
    entries of multimodal checkpoints, such as the larger ones of Gemma 3, describe only the text model.
    """

    name: str
    parameters: int
    source: str
    facts: Mapping[str, Any] = field(hash=False)
    note: str = ""
    alias_of: str | None = None


@cache
def _entries() -> dict[str, CatalogEntry]:
    """Every entry by the name that finds it: each model in the file's order, followed by its aliases."""
    text = resources.files(__package__).joinpath("catalog.json").read_text(encoding="utf-8")
    entries = {}
    for model_name, model in json.loads(text).items():
        for name, differences in {model_name: {}, **model["aliases"]}.items():
            entries[name] = CatalogEntry(
                name=name,
                parameters=model["parameters"],
                source=model["source"],
                facts=model["facts"] | differences,
                note=model.get("note", ""),
                alias_of=None if name == model_name else model_name,
            )
    return entries


def names(*, aliases: bool = False) -> list[str]:
    """The hub names of the models in the catalog; with `aliases`, every name that `find` knows."""
    return [name for name, entry in _entries().items() if aliases or entry.alias_of is None]


def find(name: str) -> CatalogEntry | None:
    """The entry of a hub name or alias, spelled as on the hub; None when the catalog has no such model."""
    return _entries().get(name)


def families() -> set[str]:
    """The `model_type` of every model in the catalog."""
    return {entry.facts["model_type"] for entry in _entries().values()}


def config(name: str) -> PreTrainedConfig:
    """A new configuration of a catalogued model. Raises ConfigError, with the closest names, if there is none."""
    entry = find(name)
    if entry is None:
        hint = ", ".join(nearest(name))
        raise ConfigError(f"no model {name!r} in the catalog" + (f"; did you mean {hint}?" if hint else ""))

    from transformers import AutoConfig

    # transformers completes rope_parameters in place; the catalog must not change with it.
    return AutoConfig.for_model(**deepcopy(dict(entry.facts)))


def model_class(config: Any) -> Any | None:
    """transformers' class for the language model of a configuration; None for a model with its own code.

    That of a composite model is its causal language model or, without one that can be saved by itself, the class that
    answers about images.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    sees = "text_config" in config.sub_configs and not config.get_text_config().is_encoder_decoder
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, *([MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING] if sees else [])):
        if type(config) in mapping:
            known = mapping[type(config)]
            known = known[0] if isinstance(known, tuple) else known
            if sees and mapping is MODEL_FOR_CAUSAL_LM_MAPPING and known.config_class not in mapping:
                continue  # the type that it saves has no such class (Emu3, Mllama)
            return known
    return None


def is_whole(config: Any, known: Any) -> bool:
    """Whether `known`, the `model_class` of a composite configuration, is a class for the whole composite model."""
    return known is not None and "text_config" in config.sub_configs and known.config_class is type(config)


def text_code(config: Any) -> Mapping[str, Any] | None:
    """The global names of transformers' code for the text model of a configuration; None for a model with its own."""
    from transformers import MODEL_MAPPING

    known, text = model_class(config), config.get_text_config()
    if is_whole(config, known) and type(text) in MODEL_MAPPING:
        known = MODEL_MAPPING[type(text)]
    return None if known is None else vars(sys.modules[known.__module__])


def values(config: Any, name: str) -> list[Any]:
    """The attribute `name` of the text model's config, for each layer if layers differ, else once; None if missing.

    transformers 5.24 raises an error if an attribute in which layers differ, such as Gemma 4's `head_dim`, is read for
    all of them.
    """
    text = config.get_text_config()
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    return [getattr(layer, name, None) for layer in layers]


def says(model: type, attribute: str) -> bool:
    """A capability flag of a transformers model class, such as `_supports_sdpa`; these have no public names."""
    return bool(getattr(model, attribute))


def nearest(name: str, limit: int = 3) -> list[str]:
    """Up to `limit` similar names, the closest first; without case, and without the organisation if `name` has none."""
    spelled = {}
    for known in names(aliases=True):
        spelled[(known if "/" in name else known.split("/")[1]).lower()] = known
    return [spelled[match] for match in difflib.get_close_matches(name.lower(), spelled, n=limit)]


def attention_of(config: Any) -> str:
    """The name, in transformers, of the attention of a model with this config."""
    name: str = config._attn_implementation  # noqa: SLF001 -- transformers 5.24 has no public name for it
    return name


def float32_modules(model: Any) -> tuple[Any, Any]:
    """Names of the modules that a model keeps in float32 if loaded in 16 bit of any type, and if in float16."""
    return model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules  # noqa: SLF001 -- nor for these
