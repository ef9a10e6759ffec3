"""Recipes: the form of each weight in a file of llama.cpp, whose types are mixed.

The rules are those of `llama-quantize` without an importance matrix (src/llama-quant.cpp of b10605). Training, which
holds a base in the forms of the file, and the writer of GGUF files ask the same function, by names of either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from finetune.forms import FORMS, Recipe
from finetune.model.source import gguf_families
from finetune.model.structure import experts

RECIPES: dict[str, Recipe] = {name: form.recipe for name, form in FORMS.items() if form.recipe}

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
"""llama.cpp's names of the output head and of the embedding."""

# Matches names of llama.cpp and of transformers without `.weight`: the number of the layer, and the last part.
_IN_LAYER = re.compile(r"(?:^|\.)(?:blk|layers|h)\.(\d+)\..*?(\w+?)(?:_exps|_shexp)?$")
_PARTS = {
    "v_proj": "attn_v", "k_proj": "attn_k", "o_proj": "attn_output", "qkv_proj": "attn_qkv", "in_proj_qkv": "attn_qkv",
    "down_proj": "ffn_down",
}  # fmt: skip
"""Parts of a layer whose form a recipe may change: llama.cpp's name of each, by transformers'."""
# Small matrices that stay in 16 bit, by either name.
_KEPT = ("per_layer_model_proj.weight", "per_layer_model_projection.weight")


def wanted(name: str, kind: str, text: Any) -> str | None:
    """The form of the matrix `name` in a file of `kind` (a key of RECIPES), if blocks divide its rows; None: 16 bit.

    `name` is llama.cpp's or transformers' (the head and the embedding by llama.cpp's alone), `text` transformers'
    config of the language model.
    """
    recipe = RECIPES[kind]
    if name == HEAD or (name == EMBEDDING and text.tie_word_embeddings):
        return recipe.head
    if name.endswith(_KEPT):
        return None
    if not (match := _IN_LAYER.search(name.removesuffix(".weight"))):
        return recipe.main
    layer, layers, part = int(match[1]), text.num_hidden_layers, _PARTS.get(match[2], match[2])
    if experts.count(text) == 8:  # small matrices beside the experts (Mixtral)
        if part in ("attn_v", "attn_qkv", "attn_k"):
            return "q8_0"
        if part == "attn_output" and recipe.main in ("q4_k", "iq4_xs"):
            return "q5_k"
    if part in ("attn_v", "attn_qkv", "ffn_down"):
        offset = layer - layers // 8
        if recipe.more_bits and (offset < 0 or layer >= 7 * layers // 8 or offset % 3 == 2):
            return recipe.head
        if recipe.main == "iq4_xs":
            key_heads = gguf_families.per_layer(text, "num_key_value_heads") or text.num_attention_heads
            first = key_heads[0] if isinstance(key_heads, list) else key_heads
            has_more_bits = offset < 0 if part == "ffn_down" else text.num_attention_heads // first >= 4
            if has_more_bits:
                return "q5_k"
        if part != "ffn_down" and layers == 80 and recipe.main == "q4_k":  # the 70B model: eight heads share these
            return "q5_k"
    return recipe.main


def form_of(name: str, columns: int, kind: str, text: Any) -> str | None:
    """The form (a key of FORMS) of a matrix with rows of `columns`; as `wanted`, or what replaces it."""
    first = wanted(name, kind, text)
    for form in (first, FORMS[first].codec.gguf.fallback) if first else ():
        if form and columns % FORMS[form].codec.blocks.columns == 0:
            return form
    return None


# -- of a model --------------------------------------------------------------------------------------------------------

_forms: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
"""For each module of a model that `remember` saw, the forms of its weights by their names in it."""


def remember(model: Any, forms: Mapping[str, str]) -> None:
    """Remember the forms of the weights of `model` by name, also for layers that are numbered anew afterwards."""
    for name, form in forms.items():
        path, _, own = name.rpartition(".")
        _forms.setdefault(model.get_submodule(path), {})[own] = form


def remembered(module: nn.Module) -> Mapping[str, str]:
    """The forms of the weights of a module by their names in it; empty if they are of one form, or of none."""
    return _forms.get(module, {})


def of_modules(model: nn.Module) -> dict[str, str]:
    """The forms of the weights of a model that `remember` saw, by name; empty if it did not."""
    return {f"{path}.{own}": form for path, module in model.named_modules() for own, form in remembered(module).items()}
