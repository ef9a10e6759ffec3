"""The tensors of a model under llama.cpp's names, and in its order of rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gguf
import torch

from finetune.errors import ConfigError
from finetune.model.source import gguf_families
from finetune.model.source.gguf_families import Family


def own(names: Iterable[str]) -> dict[str, str]:
    """The names of weights in the language model alone, without those of other parts of the model."""
    part = "language_model."
    if not any(part in name for name in names):
        return {name: name for name in names}
    return {name: name.replace(part, "", 1) for name in names if part in name or name.startswith("lm_head.")}


def mapped(config: Any, family: Family) -> Any:
    """The `gguf` package's map from names of a model's tensors to those of llama.cpp."""
    [arch] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch]
    return gguf.get_tensor_name_map(arch, config.num_hidden_layers)


def name_of(names: Any, name: str, family: Family) -> str:
    """The name of a tensor in a GGUF file. Raises ConfigError if llama.cpp has none."""
    known: str | None = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
    if known is None:
        raise ConfigError(f"the tensor `{name}` has no place in llama.cpp's `{family.arch}`; export `merged` instead")
    return known


def stored(name: str, tensor: torch.Tensor, config: Any, family: Family) -> gguf_families.Parts:
    """The tensors that llama.cpp stores for one of the model's: a weight, a bias, or a LoRA's B."""
    if family.permuted and ".self_attn." in name:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            # transformers rotates halves of each head, llama.cpp neighbouring pairs.
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    return family.parts(name, tensor, config)


def frequency_factors(config: Any) -> torch.Tensor | None:
    """The divisors of the rotary frequencies for a scaling that is stored as a tensor: (head size / 2,), else None."""
    rope, head = gguf_families.rope(config), gguf_families.head_size(config)
    if rope["rope_type"] == "proportional":
        rotated = int(rope["partial_rotary_factor"] * head // 2)
        return torch.tensor([1.0] * rotated + [1e30] * (head // 2 - rotated)) * rope.get("factor", 1.0)
    if rope["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32) / head) / scaled
