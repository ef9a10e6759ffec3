"""transformers' model types as those of llama.cpp. A new one is one entry in FAMILIES.

A family adds to what all GGUF files hold: hyperparameters, and tensors that llama.cpp stores differently. A setting
that llama.cpp would compute differently is refused (checked against src/models/ and
conversion/ of ggml-org/llama.cpp, 2026).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import ConfigError

Refuse = Callable[[Any], str | None]
Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One of transformers' model types as one of llama.cpp's.

    `refuse` returns the setting that llama.cpp would compute differently (None: there is none), `add` adds the family's
    own keys. `parts(name, tensor, config)` returns the tensors that one of the model is stored as, by the names that
    `gguf` maps; it also takes tensors on the meta device. `approximate` changes a loaded model to compute what
    llama.cpp is known to compute instead, and returns the difference as a sentence (None: there is none). `permuted`:
    query and key rows are stored in the order of llama.cpp's rotary embedding. `activation` is the only one that
    llama.cpp supports for the family. `readable`: whether transformers reads such a file; otherwise only llama.cpp
    proves it.
    """

    arch: str
    refuse: Refuse = lambda config: None
    add: Callable[[Any, Any], None] = lambda writer, config: None
    parts: Callable[[str, torch.Tensor, Any], Parts] = lambda name, tensor, config: {name: tensor}
    approximate: Callable[[Any], str | None] = lambda model: None
    permuted: bool = False
    activation: str = "silu"
    readable: bool = True


def text(config: Any) -> Any:
    """The language model's part of a transformers configuration."""
    return config.get_text_config()


def rope(config: Any) -> dict[str, Any]:
    """The rotary embedding's parameters; if layers differ, those of full attention."""
    return {"rope_type": "default", **own_rope(config)}


def own_rope(config: Any) -> dict[str, Any]:
    """The part of `config` that `rope` copies."""
    parameters: dict[str, Any] = config.rope_parameters
    return parameters.get("full_attention", parameters)


def head_size(config: Any) -> int:
    """The size of an attention head; if layers differ, that of full attention."""
    if config.model_type == "gemma4_text":
        config = config.per_layer_config[config.layer_types.index("full_attention")]
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def per_layer(config: Any, name: str) -> Any:
    """A setting of the layers: one value, or a list where they differ."""
    if config.model_type != "gemma4_text":
        return getattr(config, name, None)
    values = [getattr(config.per_layer_config[layer], name) for layer in range(config.num_hidden_layers)]
    if name == "intermediate_size" and config.use_double_wide_mlp:
        own = config.num_hidden_layers - config.num_kv_shared_layers
        values = [size * (1 if layer < own else 2) for layer, size in enumerate(values)]
    return values if len(set(values)) > 1 else values[0]


def family(config: Any) -> Family:
    """The family of a transformers configuration. Raises ConfigError if llama.cpp would compute it otherwise."""
    config = text(config)
    entry = FAMILIES.get(config.model_type)
    if entry is None:
        raise ConfigError(
            f"GGUF of a `{config.model_type}` model is not written here, only of {', '.join(FAMILIES)}; export "
            "`merged` and give it to llama.cpp's convert_hf_to_gguf.py"
        )
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    why = entry.refuse(config) or _refuse_rope(config, entry)
    if activation != entry.activation:
        why = f"uses the activation {activation}"
    if why:
        raise ConfigError(f"this `{config.model_type}` model {why}, which llama.cpp's `{entry.arch}` cannot express")
    return entry


_SCALINGS = ("default", "linear", "llama3", "yarn")
_DEFAULTS_OF_YARN = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "truncate": True}


def _refuse_rope(config: Any, family: Family) -> str | None:
    parameters = rope(config)
    kind = parameters["rope_type"]
    if kind == "proportional" and family.arch == "gemma4":
        return None
    if kind not in _SCALINGS or (kind == "yarn" and family.arch == "phi3"):
        return f"scales its rotary embedding by `{kind}`, which is not written here"
    if kind == "llama3" and family.arch != "llama":  # the one architecture that reads its factors
        return "scales its rotary embedding by `llama3`"
    if kind == "yarn":
        for name, value in _DEFAULTS_OF_YARN.items():
            if parameters.get(name, value) not in (value, None) and (name, family.arch) != ("truncate", "gpt-oss"):
                return f"scales its rotary embedding by YaRN with `{name}`: {parameters[name]}"
        scales = (parameters.get("mscale"), parameters.get("mscale_all_dim"))
        if any(scales) and not (family.arch == "mistral3" and scales[0] == 1 and scales[1]):
            return "scales its rotary embedding by YaRN with `mscale`"
    return None


def _refuse_windows(config: Any) -> str | None:
    return "uses a sliding window" if getattr(config, "use_sliding_window", False) else None


# -- Gemma -----------------------------------------------------------------------------------------------------------

_GELU = "gelu_pytorch_tanh"


def _refuse_gemma2(config: Any) -> str | None:
    if config.attn_logit_softcapping is None or config.final_logit_softcapping is None:
        return "has no soft capping"
    if _is_sliding(config) != [layer % 2 == 0 for layer in range(config.num_hidden_layers)]:
        return "has other layers with a sliding window than every second"
    return None if config.query_pre_attn_scalar == gemma_scale(config, 46) else "scales attention by another factor"


def _refuse_gemma3(config: Any) -> str | None:
    sliding = config.rope_parameters["sliding_attention"]
    if sliding.get("rope_type", "default") != "default":
        return "scales the rotary embedding of layers with a sliding window"
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "use_bidirectional_attention", False):
        return "has another attention"
    return None


def _is_sliding(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def gemma_scale(config: Any, wide_layers: int = 62) -> int:
    """The number by whose root llama.cpp divides scores; `wide_layers`: depth of the Gemma that has another scale."""
    if config.num_hidden_layers == wide_layers:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)


def _add_gemma(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_gemma3(writer: Any, config: Any) -> None:
    _add_gemma(writer, config)
    writer.add_sliding_window_pattern(_is_sliding(config))
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _gemma2_parts(name: str, tensor: torch.Tensor, config: Any) -> Parts:
    return {name: tensor.float() + 1 if name.endswith("norm.weight") else tensor}


def _gemma3_parts(name: str, tensor: torch.Tensor, config: Any) -> Parts:
    [tensor] = _gemma2_parts(name, tensor, config).values()
    if name.endswith("q_norm.weight"):  # carries the scale of attention, which is fixed in llama.cpp
        tensor = tensor * (gemma_scale(config) / config.query_pre_attn_scalar) ** 0.5
    return {name: tensor}


def _refuse_gemma4(config: Any) -> str | None:
    sliding = config.rope_parameters["sliding_attention"]
    if sliding.get("rope_type", "default") != "default" or sliding.get("partial_rotary_factor", 1.0) != 1.0:
        return "scales the rotary embedding of layers with a sliding window"
    if rope(config)["rope_type"] != "proportional":
        return "has another rotary embedding in layers that attend to all tokens"
    if config.use_bidirectional_attention == "all" or config.attention_bias:
        return "has another attention"
    return None


def _add_gemma4(writer: Any, config: Any) -> None:
    _add_gemma3(writer, config)
    small = config.per_layer_config[config.layer_types.index("sliding_attention")].head_dim
    writer.add_key_length_swa(small)
    writer.add_value_length_swa(small)
    writer.add_rope_dimension_count_swa(small)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    if config.enable_moe_block:
        _add_experts(writer, config.num_experts, config.top_k_experts, config.moe_intermediate_size)


_GEMMA4_NAMES = {
    "layer_scalar": "layer_scalar.weight",
    ".experts.gate_up_proj": ".experts.gate_up_proj.weight",
    ".experts.down_proj": ".experts.down_proj.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
}
"""Ends of the names of Gemma 4's tensors, and those by which `gguf` knows them."""


def _gemma4_parts(name: str, tensor: torch.Tensor, config: Any) -> Parts:
    end = next((end for end in _GEMMA4_NAMES if name.endswith(end)), None)
    return {name.removesuffix(end) + _GEMMA4_NAMES[end] if end else name: tensor}


# -- mixtures --------------------------------------------------------------------------------------------------------


def _refuse_qwen3_moe(config: Any) -> str | None:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "has layers without experts"
    if not config.norm_topk_prob:
        return "does not normalize the weights of its experts"
    return _refuse_windows(config)


def _add_experts(writer: Any, count: int, used: int, inside: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(used)
    writer.add_expert_feed_forward_length(inside)


def _refuse_mixtral(config: Any) -> str | None:
    window = config.sliding_window
    return "uses a sliding window" if window and window < config.max_position_embeddings else None


def _add_mixtral(writer: Any, config: Any) -> None:
    _add_experts(writer, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)


def _add_qwen3_moe(writer: Any, config: Any) -> None:
    _add_experts(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)


def _expert_parts(name: str, tensor: torch.Tensor, config: Any) -> Parts:
    """Experts: (experts, gate and up, hidden) and (experts, hidden, inside)."""
    experts, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        return {f"{experts}.gate_proj.weight": gate, f"{experts}.up_proj.weight": up}
    return {f"{name}.weight" if name.endswith("experts.down_proj") else name: tensor}


def _refuse_gpt_oss(config: Any) -> str | None:
    if _is_sliding(config) != [layer % 2 == 0 for layer in range(config.num_hidden_layers)]:
        return "has other layers with a sliding window than every second"
    if not config.attention_bias or getattr(config, "swiglu_limit", 7.0) != 7.0:
        return "has no biases of attention, or another limit of its activation"
    return None


def _add_gpt_oss(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    _add_experts(writer, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)


def _gpt_oss_parts(name: str, tensor: torch.Tensor, config: Any) -> Parts:
    """Experts: (experts, hidden, gate and up interleaved) and (experts, inside, hidden), with biases."""
    experts, _, last = name.rpartition(".")
    if last.startswith("gate_up_proj"):
        end = "bias" if last.endswith("bias") else "weight"
        rows = tensor if end == "bias" else tensor.transpose(1, 2)  # (experts, gate and up, ...)
        return {f"{experts}.gate_proj.{end}": rows[:, ::2], f"{experts}.up_proj.{end}": rows[:, 1::2]}
    if last == "down_proj_bias":
        return {f"{experts}.down_proj.bias": tensor}
    if last == "down_proj":
        return {f"{experts}.down_proj.weight": tensor.transpose(1, 2)}
    return {f"{name}.weight" if last == "sinks" else name: tensor}


def _approximate_gpt_oss(model: Any) -> str | None:
    if rope(model.config).get("truncate", True):
        return None
    config = copy.deepcopy(model.config)
    config.rope_parameters["truncate"] = True
    device = model.model.rotary_emb.inv_freq.device
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return "llama.cpp rounds the range of dimensions that YaRN scales to whole ones; this model does not"


# -- Qwen 3.5 --------------------------------------------------------------------------------------------------------


def _refuse_qwen35(config: Any) -> str | None:
    if config.linear_key_head_dim != config.linear_value_head_dim:
        return "has keys and values of different sizes in its linear attention"
    if config.attention_bias:
        return "has biases of attention"
    if "full_attention" not in config.layer_types or config.layer_types != _interval(config):
        return "has other layers with full attention than one in equal steps"
    return None


def _interval(config: Any) -> list[str]:
    step = config.layer_types.index("full_attention") + 1
    return ["linear_attention" if (layer + 1) % step else "full_attention" for layer in range(config.num_hidden_layers)]


def _add_qwen35(writer: Any, config: Any) -> None:
    # Text has one position for all sections.
    sections = rope(config).get("mrope_section") or [11, 11, 10]
    writer.add_rope_dimension_sections([*sections, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)


OTHER_COLUMNS = ".linear_attn.out_proj.weight"
"""The end of the names of weights whose columns llama.cpp stores in another order, which blocks cannot follow."""


def _qwen35_parts(name: str, tensor: torch.Tensor, config: Any) -> Parts:
    if ".linear_attn." not in name:
        return _gemma2_parts(name, tensor, config)
    start, _, last = name.partition(".linear_attn.")
    size, keys = config.linear_value_head_dim, config.linear_key_head_dim * config.linear_num_key_heads
    if last == "A_log":
        return {name: -_tiled(tensor, 1, config).float().exp()}
    if last == "dt_bias":
        return {f"{start}.linear_attn.dt_proj.bias": _tiled(tensor, 1, config)}
    if last in ("conv1d.weight", "in_proj_qkv.weight"):
        tensor = tensor.squeeze(1) if last == "conv1d.weight" else tensor
        return {name: torch.cat([tensor[: 2 * keys], _tiled(tensor[2 * keys :], size, config)])}
    if last == "in_proj_z.weight":
        return {name: _tiled(tensor, size, config)}
    if last in ("in_proj_a.weight", "in_proj_b.weight"):
        return {name: _tiled(tensor, 1, config)}
    return {name: _tiled(tensor.T, size, config).T} if last == "out_proj.weight" else {name: tensor}


def _add_qwen35_moe(writer: Any, config: Any) -> None:
    _add_qwen35(writer, config)
    _add_qwen3_moe(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _qwen35_moe_parts(name: str, tensor: torch.Tensor, config: Any) -> Parts:
    return (_expert_parts if ".mlp.experts." in name else _qwen35_parts)(name, tensor, config)


def _tiled(tensor: torch.Tensor, size: int, config: Any) -> torch.Tensor:
    """Rows of value heads in llama.cpp's order: (keys, values of a key, size) becomes (values of a key, keys, size)."""
    heads = config.linear_num_key_heads
    rows = tensor.reshape(heads, config.linear_num_value_heads // heads, size, *tensor.shape[1:])
    return rows.transpose(0, 1).reshape(tensor.shape)


# -- others ----------------------------------------------------------------------------------------------------------


def _add_phi3(writer: Any, config: Any) -> None:
    writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
    writer.add_sliding_window(0)  # llama.cpp has none for Phi 3; see `gguf_model.context`


def _refuse_smollm3(config: Any) -> str | None:
    if list(config.no_rope_layers) != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
        return "has other layers without a rotary embedding than every fourth"
    return "has biases in its feed-forward layers" if config.mlp_bias else _refuse_windows(config)


def _refuse_ministral3(config: Any) -> str | None:
    if config.sliding_window and config.sliding_window < config.max_position_embeddings:
        return "uses a sliding window"
    return None if rope(config)["rope_type"] == "yarn" else "has another rotary embedding than YaRN"


def _add_ministral3(writer: Any, config: Any) -> None:
    parameters = rope(config)
    if parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(parameters["mscale_all_dim"])
    if parameters.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(parameters["llama_4_scaling_beta"])


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", permuted=True),
    "mistral": Family("llama", permuted=True),
    "mixtral": Family("llama", _refuse_mixtral, _add_mixtral, _expert_parts, permuted=True, readable=False),
    "ministral3": Family("mistral3", _refuse_ministral3, _add_ministral3, permuted=True, readable=False),
    "smollm3": Family("smollm3", _refuse_smollm3, permuted=True, readable=False),
    "qwen2": Family("qwen2", _refuse_windows),
    "qwen3": Family("qwen3", _refuse_windows),
    "qwen3_moe": Family("qwen3moe", _refuse_qwen3_moe, _add_qwen3_moe, _expert_parts),
    "qwen3_5_text": Family("qwen35", _refuse_qwen35, _add_qwen35, _qwen35_parts, readable=False),
    "qwen3_5_moe_text": Family("qwen35moe", _refuse_qwen35, _add_qwen35_moe, _qwen35_moe_parts, readable=False),
    "gemma2": Family("gemma2", _refuse_gemma2, _add_gemma, _gemma2_parts, activation=_GELU),
    "gemma3_text": Family("gemma3", _refuse_gemma3, _add_gemma3, _gemma3_parts, activation=_GELU),
    "gemma4_text": Family("gemma4", _refuse_gemma4, _add_gemma4, _gemma4_parts, activation=_GELU, readable=False),
    "gpt_oss": Family("gpt-oss", _refuse_gpt_oss, _add_gpt_oss, _gpt_oss_parts, _approximate_gpt_oss, readable=False),
    "phi3": Family("phi3", add=_add_phi3),
}
