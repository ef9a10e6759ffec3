"""transformers' model types as those of llama.cpp. A new one is one entry in FAMILIES.

A family adds to what all GGUF files hold: hyperparameters, and tensors that llama.cpp stores differently; its class has
what is its own. A setting that llama.cpp would compute differently is refused (checked against src/models/ and
conversion/ of ggml-org/llama.cpp, 2026).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import ConfigError

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One of transformers' model types as one of llama.cpp's; those that need code of their own have a subclass.

    `permuted`: query and key rows are stored in the order of llama.cpp's rotary embedding. `activation` is the only one
    that llama.cpp supports for the family. `readable`: whether transformers reads such a file; otherwise only llama.cpp
    proves it.
    """

    arch: str
    permuted: bool = False
    activation: str = "silu"
    readable: bool = True

    def refuse(self, config: Any) -> str | None:
        """The setting that llama.cpp would compute differently; None: there is none."""
        return None

    def add(self, writer: Any, config: Any) -> None:
        """Add the family's own keys."""

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        """What a tensor of the model, which may be on the meta device, is stored as, by the names that `gguf` maps."""
        return {name: tensor}

    def approximate(self, model: Any) -> str | None:
        """Change a loaded model to compute what llama.cpp is known to compute instead.

        Returns the difference as a sentence; None: there is none.
        """
        return None


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


def _is_sliding(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _plus_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as llama.cpp stores it if the model multiplies by 1 + the weight of a norm."""
    return tensor.float() + 1 if name.endswith("norm.weight") else tensor


# -- Gemma -----------------------------------------------------------------------------------------------------------


def gemma_scale(config: Any, wide_layers: int = 62) -> int:
    """The number by whose root llama.cpp divides scores; `wide_layers`: depth of the Gemma that has another scale."""
    if config.num_hidden_layers == wide_layers:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)


class _Gemma2(Family):
    def refuse(self, config: Any) -> str | None:
        if config.attn_logit_softcapping is None or config.final_logit_softcapping is None:
            return "has no soft capping"
        if _is_sliding(config) != [layer % 2 == 0 for layer in range(config.num_hidden_layers)]:
            return "has other layers with a sliding window than every second"
        return None if config.query_pre_attn_scalar == gemma_scale(config, 46) else "scales attention by another factor"

    def add(self, writer: Any, config: Any) -> None:
        writer.add_sliding_window(config.sliding_window)
        if getattr(config, "attn_logit_softcapping", None):
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        return {name: _plus_one(name, tensor)}


class _Gemma3(_Gemma2):
    def refuse(self, config: Any) -> str | None:
        sliding = config.rope_parameters["sliding_attention"]
        if sliding.get("rope_type", "default") != "default":
            return "scales the rotary embedding of layers with a sliding window"
        if getattr(config, "attn_logit_softcapping", None) or getattr(config, "use_bidirectional_attention", False):
            return "has another attention"
        return None

    def add(self, writer: Any, config: Any) -> None:
        super().add(writer, config)
        writer.add_sliding_window_pattern(_is_sliding(config))
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        tensor = _plus_one(name, tensor)
        if name.endswith("q_norm.weight"):  # carries the scale of attention, which is fixed in llama.cpp
            tensor = tensor * (gemma_scale(config) / config.query_pre_attn_scalar) ** 0.5
        return {name: tensor}


_GEMMA4_NAMES = {
    "layer_scalar": "layer_scalar.weight",
    ".experts.gate_up_proj": ".experts.gate_up_proj.weight",
    ".experts.down_proj": ".experts.down_proj.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
}
"""Ends of the names of Gemma 4's tensors, and those by which `gguf` knows them."""


class _Gemma4(_Gemma3):
    def refuse(self, config: Any) -> str | None:
        sliding = config.rope_parameters["sliding_attention"]
        if sliding.get("rope_type", "default") != "default" or sliding.get("partial_rotary_factor", 1.0) != 1.0:
            return "scales the rotary embedding of layers with a sliding window"
        if rope(config)["rope_type"] != "proportional":
            return "has another rotary embedding in layers that attend to all tokens"
        if config.use_bidirectional_attention == "all" or config.attention_bias:
            return "has another attention"
        return None

    def add(self, writer: Any, config: Any) -> None:
        super().add(writer, config)
        small = config.per_layer_config[config.layer_types.index("sliding_attention")].head_dim
        writer.add_key_length_swa(small)
        writer.add_value_length_swa(small)
        writer.add_rope_dimension_count_swa(small)
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
        if config.enable_moe_block:
            _add_experts(writer, config.num_experts, config.top_k_experts, config.moe_intermediate_size)

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        for end, known in _GEMMA4_NAMES.items():
            if name.endswith(end):
                return {name.removesuffix(end) + known: tensor}
        return {name: tensor}


class _Qwen(Family):
    def refuse(self, config: Any) -> str | None:
        return "uses a sliding window" if getattr(config, "use_sliding_window", False) else None


# -- mixtures --------------------------------------------------------------------------------------------------------


def _add_experts(writer: Any, count: int, used: int, inside: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(used)
    writer.add_expert_feed_forward_length(inside)


def _expert_parts(name: str, tensor: torch.Tensor) -> Parts:
    """Experts: (experts, gate and up, hidden) and (experts, hidden, inside)."""
    experts, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        return {f"{experts}.gate_proj.weight": gate, f"{experts}.up_proj.weight": up}
    return {f"{name}.weight" if name.endswith("experts.down_proj") else name: tensor}


class _Mixtral(Family):
    def refuse(self, config: Any) -> str | None:
        window = config.sliding_window
        return "uses a sliding window" if window and window < config.max_position_embeddings else None

    def add(self, writer: Any, config: Any) -> None:
        _add_experts(writer, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        return _expert_parts(name, tensor)


class _Qwen3Moe(_Qwen):
    def refuse(self, config: Any) -> str | None:
        if config.mlp_only_layers or config.decoder_sparse_step != 1:
            return "has layers without experts"
        if not config.norm_topk_prob:
            return "does not normalize the weights of its experts"
        return super().refuse(config)

    def add(self, writer: Any, config: Any) -> None:
        _add_experts(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        return _expert_parts(name, tensor)


class _GptOss(Family):
    def refuse(self, config: Any) -> str | None:
        if _is_sliding(config) != [layer % 2 == 0 for layer in range(config.num_hidden_layers)]:
            return "has other layers with a sliding window than every second"
        if not config.attention_bias or getattr(config, "swiglu_limit", 7.0) != 7.0:
            return "has no biases of attention, or another limit of its activation"
        return None

    def add(self, writer: Any, config: Any) -> None:
        writer.add_sliding_window(config.sliding_window)
        _add_experts(writer, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
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

    def approximate(self, model: Any) -> str | None:
        if rope(model.config).get("truncate", True):
            return None
        config = copy.deepcopy(model.config)
        config.rope_parameters["truncate"] = True
        device = model.model.rotary_emb.inv_freq.device
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
        return "llama.cpp rounds the range of dimensions that YaRN scales to whole ones; this model does not"


# -- Qwen 3.5 --------------------------------------------------------------------------------------------------------

OTHER_COLUMNS = ".linear_attn.out_proj.weight"
"""The end of the names of weights whose columns llama.cpp stores in another order, which blocks cannot follow."""


class _Qwen35(Family):
    def refuse(self, config: Any) -> str | None:
        if config.linear_key_head_dim != config.linear_value_head_dim:
            return "has keys and values of different sizes in its linear attention"
        if config.attention_bias:
            return "has biases of attention"
        kinds, layers = config.layer_types, range(1, config.num_hidden_layers + 1)
        step = kinds.index("full_attention") + 1 if "full_attention" in kinds else None
        if not step or kinds != ["linear_attention" if layer % step else "full_attention" for layer in layers]:
            return "has other layers with full attention than one in equal steps"
        return None

    def add(self, writer: Any, config: Any) -> None:
        # Text has one position for all sections.
        sections = rope(config).get("mrope_section") or [11, 11, 10]
        writer.add_rope_dimension_sections([*sections, 0])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        """Rows of value heads are reordered: (keys, values of a key, size) becomes (values of a key, keys, size)."""
        start, _, last = name.partition(".linear_attn.")
        if not last:
            return {name: _plus_one(name, tensor)}
        heads, size = config.linear_num_key_heads, config.linear_value_head_dim

        def tiled(tensor: torch.Tensor, size: int) -> torch.Tensor:
            rows = tensor.reshape(heads, config.linear_num_value_heads // heads, size, *tensor.shape[1:])
            return rows.transpose(0, 1).reshape(tensor.shape)

        if last == "A_log":
            return {name: -tiled(tensor, 1).float().exp()}
        if last == "dt_bias":
            return {f"{start}.linear_attn.dt_proj.bias": tiled(tensor, 1)}
        if last in ("conv1d.weight", "in_proj_qkv.weight"):
            tensor = tensor.squeeze(1) if last == "conv1d.weight" else tensor
            values = 2 * heads * config.linear_key_head_dim  # after queries and keys
            return {name: torch.cat([tensor[:values], tiled(tensor[values:], size)])}
        if last == "in_proj_z.weight":
            return {name: tiled(tensor, size)}
        if last in ("in_proj_a.weight", "in_proj_b.weight"):
            return {name: tiled(tensor, 1)}
        return {name: tiled(tensor.T, size).T if last == "out_proj.weight" else tensor}


class _Qwen35Moe(_Qwen35):
    def add(self, writer: Any, config: Any) -> None:
        super().add(writer, config)
        _add_experts(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)

    def parts(self, name: str, tensor: torch.Tensor, config: Any) -> Parts:
        return _expert_parts(name, tensor) if ".mlp.experts." in name else super().parts(name, tensor, config)


# -- others ----------------------------------------------------------------------------------------------------------


class _Phi3(Family):
    def add(self, writer: Any, config: Any) -> None:
        writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
        writer.add_sliding_window(0)  # llama.cpp has none for Phi 3; see `gguf_model.context`


class _SmolLM3(_Qwen):
    def refuse(self, config: Any) -> str | None:
        if list(config.no_rope_layers) != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
            return "has other layers without a rotary embedding than every fourth"
        return "has biases in its feed-forward layers" if config.mlp_bias else super().refuse(config)


class _Ministral3(Family):
    def refuse(self, config: Any) -> str | None:
        if config.sliding_window and config.sliding_window < config.max_position_embeddings:
            return "uses a sliding window"
        return None if rope(config)["rope_type"] == "yarn" else "has another rotary embedding than YaRN"

    def add(self, writer: Any, config: Any) -> None:
        parameters = rope(config)
        if parameters.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(parameters["mscale_all_dim"])
        if parameters.get("llama_4_scaling_beta"):
            writer.add_attn_temperature_scale(parameters["llama_4_scaling_beta"])


_GELU = "gelu_pytorch_tanh"
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", permuted=True),
    "mistral": Family("llama", permuted=True),
    "mixtral": _Mixtral("llama", permuted=True, readable=False),
    "ministral3": _Ministral3("mistral3", permuted=True, readable=False),
    "smollm3": _SmolLM3("smollm3", permuted=True, readable=False),
    "qwen2": _Qwen("qwen2"),
    "qwen3": _Qwen("qwen3"),
    "qwen3_moe": _Qwen3Moe("qwen3moe"),
    "qwen3_5_text": _Qwen35("qwen35", readable=False),
    "qwen3_5_moe_text": _Qwen35Moe("qwen35moe", readable=False),
    "gemma2": _Gemma2("gemma2", activation=_GELU),
    "gemma3_text": _Gemma3("gemma3", activation=_GELU),
    "gemma4_text": _Gemma4("gemma4", activation=_GELU, readable=False),
    "gpt_oss": _GptOss("gpt-oss", readable=False),
    "phi3": _Phi3("phi3"),
}
