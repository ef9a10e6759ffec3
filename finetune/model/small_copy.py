"""A small copy of any architecture: narrow, with as few layers as there are kinds of them, and random weights."""

from __future__ import annotations

from typing import Any

import torch

from finetune.config import QuantizationSection
from finetune.model import skeleton

WORDS = 4096
"""The largest vocabulary of a copy, more than builtin:tiny-llama has."""
MOST_PARAMETERS = 2**26
"""The most parameters of a copy; that of any known architecture has a tenth of them."""
_LAYERS = 2
_OF_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
# Sizes by what a config may call them. Not `index_topk`, so that each token attends to all before it: of keys with
# nearly equal scores rounding would choose, and move the logits of the copy by percents.
_SIZES = {
    32: "hidden_size n_embd d_model n_embed dim embedding_size word_embed_proj_dim attention_hidden_size lru_width "
    "emb_dim embedding_dim",
    48: "intermediate_size n_inner ffn_dim ffn_hidden_size d_ff d_inner intermediate_size_mlp shared_intermediate_size "
    "mlp_hidden_size encoder_ffn_dim decoder_ffn_dim dff",
    16: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size kv_lora_rank q_lora_rank "
    "o_lora_rank mamba_d_head mamba_head_dim mamba_headdim mamba_chunk_size chunk_size index_head_dim",
    8: "head_dim v_head_dim global_head_dim qk_nope_head_dim qk_rope_head_dim kv_channels state_size mamba_d_state "
    "d_head linear_head_dim swa_head_dim ssm_state_size linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input laurel_rank",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads "
    "rotary_dim time_step_rank mamba_dt_rank adapter_rank",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_top_k top_k moe_topk "
    "n_mamba_heads linear_num_key_heads encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_blocks "
    "depth index_n_heads num_layers_per_stack",
    1: "n_group topk_group num_expert_group n_shared_experts mamba_n_groups mamba_ngroups first_k_dense_replace",
    512: "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions",
    64: "sliding_window",
    28: "image_size",
    14: "patch_size",
    WORDS: "vocab_size vocab_size_per_layer_input",
}  # fmt: skip
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_TOKENS = {"pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 2}
# Keys left at their defaults: they follow from other values, or count what a copy has fewer of.
_OTHERWISE = {
    "architectures", "dtype", "id2label", "label2id", "model_type", "per_layer_config", "qk_head_dim",
    "rope_parameters", "rope_scaling", "transformers_version",
}  # fmt: skip
# Corrections by model type of the rules above; None leaves a key out.
_HEADS = {"head_dim": 8}
_LATENT = {"num_key_value_heads": 4, "head_dim": None}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text",
         "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "minicpm3", "youtu"), _LATENT,
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _HEADS),
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROTARY)},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "qwen4_exp_text": {"indexer_kv_heads": 1, "indexer_budget": 16, "ngram_vocab_size_base": 1000},
    "reformer": {
        "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "feed_forward_size": 48, "attention_head_size": 8,
        "num_buckets": 4,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "hybrid_layer_ids": [1], "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1,
        "attention_hidden_size": 64, "attention_head_dim": 16,
    },
}  # fmt: skip


def config_of(whole: Any) -> Any:
    """A config like `whole` with narrow layers, two or one of each kind, and the other models of a composite one.

    Only sizes and `_OTHERWISE` change.
    """
    kind, values, layers = type(whole), whole.to_dict(), _LAYERS
    small = {name: min(size, values[name]) for name, size in _SMALL.items() if type(values.get(name)) is int}
    small |= {name: token for name, token in _TOKENS.items() if name in values}
    depth = next((values[name] for name in _OF_LAYERS if type(values.get(name)) is int), None)
    lists = {name: value for name, value in values.items() if isinstance(value, (list, tuple)) and len(value) == depth}
    for name, value in lists.items():
        if name.endswith(("_types", "_type")):
            small[name] = list(dict.fromkeys(value))
            layers = max(layers, len(small[name]))
    for name, value in lists.items():
        small[name] = (small.get(name, list(value)) * layers)[:layers]
    small |= dict.fromkeys(_OF_LAYERS & values.keys(), layers)
    for name in kind.sub_configs:
        part = getattr(whole, name, None)
        if getattr(part, "model_type", None) and hasattr(part, "sub_configs"):
            small[name] = config_of(part).to_dict()
    given = _OF_TYPE.get(whole.model_type, {})
    kept = {name: value for name, value in values.items() if name not in _OTHERWISE}
    return kind(**{name: value for name, value in {**kept, **small, **given}.items() if value is not None})


def of(whole: Any) -> Any:
    """A small copy of a model with the config `whole` (`model_of`). Raises ValueError above MOST_PARAMETERS."""
    architecture = config_of(whole)
    bare = skeleton.weightless_base(
        architecture, QuantizationSection(kind="none"), attention="eager", dtype=torch.float32
    )
    if bare.num_parameters() > MOST_PARAMETERS:
        raise ValueError(f"a copy of {architecture.model_type} has {bare.num_parameters()} parameters")
    return model_of(architecture)


def model_of(architecture: Any) -> Any:
    """A model with random weights, none all zero, in float32."""
    torch.manual_seed(0)
    made = skeleton.random_base(
        architecture,
        QuantizationSection(kind="none"),
        attention="eager",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for weight in made.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.1)
    return made
