"""How far the forecast of `finetune plan` is from what a real training step takes, over many small jobs on the CPU.

    python benchmarks/forecast_cpu.py [--only NAME] [--measure-only] [--measured FILE]

Every setting really trains two steps (see measured_step.py) in a process of its own, and is forecast in another one.
The first settings spread the levers over eight families of architecture, each value in several of them, with tiles of
logits of the usual size, which decide the peak of a small model. The others have small tiles, so that the layers
decide, and are made of many more architectures; some have long rows. Each phase's own peak is compared, for a mixture
whose routing changes it with the nearer end of its range. A setting that fails is counted, and the sweep goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import processors
import yaml
from processors import Size

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

Architecture = dict[str, Any]


def config_json(model_type: str, hidden: int, layers: int, heads: tuple[int, int], vocabulary: int, **more: Any) -> Any:
    """The values of a config.json; `heads` are query and key-value heads."""
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "vocab_size": vocabulary, "max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 0,
        "eos_token_id": 2, "pad_token_id": 3, **more,
    }  # fmt: skip


UNTIED: Any = {"tie_word_embeddings": False}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": config_json("llama", 256, 4, (4, 2), 1024),
    "llama-mha": config_json("llama", 128, 8, (4, 4), 1024, **UNTIED),
    "llama-wide": config_json("llama", 512, 4, (8, 4), 2048),
    "llama-32k": config_json("llama", 256, 4, (4, 4), 32000, **UNTIED),
    "qwen2": config_json("qwen2", 256, 6, (4, 2), 4096),
    "qwen3": config_json("qwen3", 192, 6, (4, 2), 2048, head_dim=64),
    "gemma2": config_json("gemma2", 256, 4, (4, 2), 4096, head_dim=64, sliding_window=128),
    "gemma3": config_json(
        "gemma3_text", 192, 6, (4, 1), 32768, head_dim=64, sliding_window=128, sliding_window_pattern=3
    ),
    "mistral": config_json("mistral", 256, 4, (4, 2), 2048, sliding_window=128, **UNTIED),
    "mistral-full": config_json("mistral", 320, 5, (5, 5), 2048, sliding_window=None, **UNTIED),
    "phi3": config_json("phi3", 256, 4, (4, 4), 2048, **UNTIED),
    "phi": config_json("phi", 256, 4, (4, 4), 1024, **UNTIED),
    "qwen3-moe": config_json(
        "qwen3_moe", 192, 4, (4, 2), 1024, head_dim=48, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128
    ),
    "mixtral": config_json(
        "mixtral", 128, 4, (4, 2), 1024, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2, **UNTIED
    ),
    "qwen3-moe-wide": config_json(
        "qwen3_moe", 192, 3, (4, 2), 1024, head_dim=48, num_experts=32, num_experts_per_tok=2, moe_intermediate_size=384
    ),
    "llama-110m": config_json("llama", 768, 12, (12, 4), 32000, intermediate_size=2048),
    "qwen2-120m": config_json("qwen2", 768, 12, (12, 12), 32000, intermediate_size=2304),
    "mistral-120m": config_json("mistral", 768, 12, (12, 4), 32000, sliding_window=None, **UNTIED),
}


_EXPERTS_OF_FOUR: Any = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LATENT: Any = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
_DEEPSEEK: Any = {
    **_EXPERTS_OF_FOUR, **_LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_GPT: Any = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 2048}


def _small(model_type: str, key_heads: int = 2, **more: Any) -> Architecture:
    return config_json(model_type, 128, 2, (4, key_heads), 512, **more)


SMALL: dict[str, Architecture] = {
    "small-llama": _small("llama"),
    "small-llama-deep": {**_small("llama"), "num_hidden_layers": 9},
    "small-phi3": _small("phi3", 4, **UNTIED),
    "small-qwen2": _small("qwen2"),
    "small-qwen3": _small("qwen3", head_dim=32),
    "small-mistral": _small("mistral", sliding_window=128, **UNTIED),
    "olmo2": _small("olmo2", 4, **UNTIED),
    "glm4": _small("glm4", head_dim=32, **UNTIED),
    "gemma": _small("gemma", head_dim=32),
    "small-gemma2": _small("gemma2", head_dim=32, sliding_window=128),
    "small-gemma3": _small("gemma3_text", head_dim=32, sliding_window=128),
    "olmo": _small("olmo"),
    "olmo3": _small("olmo3", sliding_window=128),
    "glm": _small("glm", head_dim=32),
    "stablelm": _small("stablelm"),
    "starcoder2": _small("starcoder2"),
    "cohere": _small("cohere"),
    "cohere2": _small("cohere2", sliding_window=128, head_dim=32),
    "granite": _small("granite"),
    "helium": _small("helium", head_dim=32),
    "exaone4": _small("exaone4"),
    "ernie4_5": _small("ernie4_5", head_dim=32),
    "hunyuan": _small("hunyuan_v1_dense", head_dim=32),
    "smollm3": _small("smollm3"),
    "seed_oss": _small("seed_oss", head_dim=32),
    "nemotron": _small("nemotron"),
    "persimmon": _small("persimmon", 4),
    "arcee": _small("arcee"),
    "apertus": _small("apertus"),
    "bitnet": _small("bitnet"),
    "diffllama": _small("diffllama"),
    "doge": _small("doge"),
    "ministral": _small("ministral", head_dim=32),
    "gpt_neox": _small("gpt_neox", 4),
    "falcon": _small("falcon", 4),
    "gptj": {**_small("gptj"), **_GPT, "rotary_dim": 16},
    "codegen": {**_small("codegen"), **_GPT, "rotary_dim": 16},
    "gpt2": {**_small("gpt2"), **_GPT},
    "gpt_bigcode": {**_small("gpt_bigcode"), **_GPT},
    "opt": {**_small("opt"), "ffn_dim": 352, "word_embed_proj_dim": 128},
    "biogpt": _small("biogpt", 4),
    "lfm2": _small("lfm2"),
    "nanochat": _small("nanochat"),
    "small-recurrentgemma": _small(
        "recurrent_gemma", num_hidden_layers=3, lru_width=128, attention_window_size=128, w_init_variance_scale=0.01
    ),
    "vaultgemma": _small("vaultgemma", head_dim=32, sliding_window=128),
    "minicpm3": _small("minicpm3", 4, **_LATENT),
    "hyperclovax": _small("hyperclovax"),
    "small-mixtral": _small("mixtral", intermediate_size=128, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _small("qwen2_moe", **_EXPERTS_OF_FOUR, num_experts=4, shared_expert_intermediate_size=128),
    "deepseek_v2": _small("deepseek_v2", 4, **_DEEPSEEK),
    "deepseek_v3": _small("deepseek_v3", 4, **_DEEPSEEK),
    "glm4_moe": _small("glm4_moe", **{**_DEEPSEEK, "head_dim": 32}),
    "ernie4_5_moe": _small("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=128, head_dim=32),
    "granitemoe": _small("granitemoe", num_local_experts=4, num_experts_per_tok=2, intermediate_size=128),
    "olmoe": _small("olmoe", 4, num_experts=4, num_experts_per_tok=2, intermediate_size=128, **UNTIED),
    "ministral3": _small("ministral3", head_dim=32, **UNTIED),
    "glm_moe_dsa": _small(
        "glm_moe_dsa", 4, **_DEEPSEEK, head_dim=16, index_topk=64, index_head_dim=32, index_n_heads=2, **UNTIED
    ),
}
ARCHITECTURES |= SMALL

_EXPERTS_OF_EIGHT: Any = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_DELTA: Any = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "num_hidden_layers": 4,
}  # fmt: skip
_INDEXED: Any = {**_DEEPSEEK, "head_dim": 16, "index_topk": 64, "index_head_dim": 32, "index_n_heads": 2}
# The architectures of 2025 and 2026, as narrow as the small ones; each kind of layer of a hybrid is there.
NEWER: dict[str, Architecture] = {
    "qwen3_5": _small("qwen3_5_text", **_DELTA),
    "qwen3_5_moe": _small(
        "qwen3_5_moe_text", **_DELTA, **_EXPERTS_OF_EIGHT, num_experts=8, shared_expert_intermediate_size=64
    ),
    "gemma4": _small(
        "gemma4_text", head_dim=32, global_head_dim=64, sliding_window=128, num_hidden_layers=6,
        vocab_size_per_layer_input=512, hidden_size_per_layer_input=16,
    ),
    "gemma4_moe": _small(
        "gemma4_text", head_dim=32, global_head_dim=64, sliding_window=128, num_hidden_layers=6,
        vocab_size_per_layer_input=512, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8,
        top_k_experts=2, moe_intermediate_size=64,
    ),
    "deepseek_v32": _small("deepseek_v32", 4, **_INDEXED, n_shared_experts=1, **UNTIED),
    "deepseek_v4": _small(
        "deepseek_v4", 1, **_EXPERTS_OF_EIGHT, head_dim=32, num_hidden_layers=4, q_lora_rank=32, o_lora_rank=32,
        o_groups=2, n_routed_experts=8, sliding_window=128, index_n_heads=2, index_head_dim=32, index_topk=64, **UNTIED,
    ),
    "gpt_oss": _small("gpt_oss", head_dim=32, num_local_experts=8, num_experts_per_tok=2, sliding_window=128, **UNTIED),
    "granitemoehybrid": _small(
        "granitemoehybrid", num_local_experts=8, num_experts_per_tok=2, intermediate_size=64,
        shared_intermediate_size=128, layer_types=["linear_attention", "full_attention"], mamba_n_heads=8,
        mamba_d_state=32, mamba_chunk_size=64,
    ),
    "phi4": _small("phi3", **UNTIED),
    "llama4": _small(
        "llama4_text", head_dim=32, num_hidden_layers=4, intermediate_size=64, intermediate_size_mlp=352,
        num_local_experts=8, interleave_moe_layer_step=2, attention_chunk_size=256, **UNTIED,
    ),
    "nemotron_h": {
        **_small(
            "nemotron_h", **_EXPERTS_OF_EIGHT, head_dim=32, n_routed_experts=8, moe_shared_expert_intermediate_size=64,
            layer_types=["linear_attention", "moe", "full_attention", "mlp"], ssm_state_size=32, mamba_num_heads=8,
            mamba_head_dim=32, n_groups=2, chunk_size=64, **UNTIED,
        ),
        "num_hidden_layers": 4,
    },
    "kimi_k2": _small(
        "deepseek_v3", 4, **{**_DEEPSEEK, **_EXPERTS_OF_EIGHT, "n_routed_experts": 16}, n_shared_experts=1,
        num_hidden_layers=3, **UNTIED,
    ),
    "kimi_linear": _small(
        "kimi_linear", 4, **_EXPERTS_OF_EIGHT, num_local_experts=8, num_hidden_layers=4, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, linear_num_heads=4, linear_head_dim=32,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"], **UNTIED,
    ),
    "minimax": _small("minimax", num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, block_size=64),
    "minimax_m2": _small(
        "minimax_m2", head_dim=32, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, **UNTIED
    ),
    "lfm2_moe": _small(
        "lfm2_moe", **_EXPERTS_OF_EIGHT, num_experts=8, num_dense_layers=1, num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
    ),
    "olmo_hybrid": _small(
        "olmo_hybrid", 4, num_hidden_layers=4, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, **UNTIED,
    ),
    "dbrx": {
        "model_type": "dbrx", "vocab_size": 512, "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048,
        "pad_token_id": 3, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": 128, "ffn_hidden_size": 128, "moe_num_experts": 8, "moe_top_k": 2,
            "ffn_act_fn": {"name": "silu"},
        },
    },
}  # fmt: skip
ARCHITECTURES |= NEWER


def _decoder(model_type: str, **more: Any) -> Architecture:
    return {**_small(model_type, head_dim=32), "num_hidden_layers": 6, "vocab_size": 1024, **more}


def _tokens(model_type: str, **named: str) -> dict[str, int]:
    return {key: processors.token(model_type, token) for key, token in named.items()}


def _qwen_vl(model_type: str, text: Architecture, **tower: Any) -> Architecture:
    ids = _tokens(
        model_type, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>",
    )  # fmt: skip
    grid = {"depth": 6, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {"model_type": model_type, **UNTIED, **ids, "text_config": text, "vision_config": {**grid, **tower}}


def _tiled(model_type: str) -> Architecture:
    return {
        "model_type": model_type, **_tokens(model_type, image_token_id="<image>"), "pad_token_id": 257,
        "scale_factor": 2, **UNTIED, "text_config": _decoder("llama"),
        "vision_config": {**_TOWER, **_LAYERS, "image_size": 112, "patch_size": 14},
    }  # fmt: skip


_ROPE: Any = {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 10000.0}
_TOWER: Any = {"hidden_size": 192, "intermediate_size": 512}
_LAYERS: Any = {"num_hidden_layers": 6, "num_attention_heads": 4}
_SIXTEEN: Any = {**_TOWER, "patch_size": 16, "out_hidden_size": 128, "num_position_embeddings": 256}
_SEES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}

# Bases that see.
SEEING: dict[str, Architecture] = {
    "qwen2-vl": _qwen_vl(
        "qwen2_vl", _decoder("qwen2_vl_text", rope_parameters=_ROPE), embed_dim=192, hidden_size=128, mlp_ratio=3
    ),
    "qwen2.5-vl": _qwen_vl(
        "qwen2_5_vl", _decoder("qwen2_5_vl_text", rope_parameters=_ROPE), **_TOWER, out_hidden_size=128,
        fullatt_block_indexes=[2, 5],
    ),
    "qwen3-vl": _qwen_vl(
        "qwen3_vl", _decoder("qwen3_vl_text", rope_parameters=_ROPE), **_SIXTEEN, deepstack_visual_indexes=[1, 3, 5]
    ),
    "qwen3.5-vl": _qwen_vl(
        "qwen3_5",
        {**NEWER["qwen3_5"], "vocab_size": 1024, "head_dim": 32,
         "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
        **_SIXTEEN,
    ),
    "gemma3-vl": {
        "model_type": "gemma3", "mm_tokens_per_image": 64,
        **_tokens("gemma3", **{f"{name}_index": token for name, token in _SEES.items()}),
        "text_config": _decoder(
            "gemma3_text", sliding_window=128, sliding_window_pattern=3, query_pre_attn_scalar=32
        ),
        "vision_config": {**_TOWER, **_LAYERS, "image_size": 224, "patch_size": 14},
    },
    "gemma4-vl": {
        "model_type": "gemma4", "audio_config": None,
        **_tokens(
            "gemma4", **{f"{name}_id": token for name, token in _SEES.items()}, video_token_id="<|video|>",
            audio_token_id="<|audio|>",
        ),
        "text_config": {
            **NEWER["gemma4"], "vocab_size": 1024, "vocab_size_per_layer_input": 1024,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            **_TOWER, **_LAYERS, "num_key_value_heads": 4, "head_dim": 48, "patch_size": 16, "pooling_kernel_size": 3,
            "position_embedding_size": 256,
        },
    },
    "idefics3": _tiled("idefics3"),
    "smolvlm": _tiled("smolvlm"),
    "internvl": {
        "model_type": "internvl", **_tokens("internvl", image_token_id="<IMG_CONTEXT>"), "image_seq_length": 16,
        **UNTIED, "text_config": _decoder("qwen2"),
        "vision_config": {**_TOWER, **_LAYERS, "image_size": [112, 112], "patch_size": [14, 14]},
    },
}  # fmt: skip
ARCHITECTURES |= SEEING


@dataclass(frozen=True)
class Setting:
    """One job: rows of `length` tokens, of which the last `trained` (by default three quarters) are trained.

    `overrides` are those of the command line. `padded` makes the last of several rows shorter. `images` are the sizes
    of each row's, for a base that sees.
    """

    name: str
    architecture: str
    length: int
    micro_batch: int = 1
    accumulation: int = 1
    overrides: str = ""
    trained: int | None = None
    padded: bool = True
    images: tuple[tuple[Size, ...], ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        given = dict(override.split("=", 1) for override in self.overrides.split())
        if self.images:
            kind = ARCHITECTURES[self.architecture]["model_type"]
            given = {"model.vision": "frozen", "model.name": processors.folder(kind), **given}
        return {
            "data.eval": "none",
            "data.max_length": self.length,
            "training.micro_batch": self.micro_batch,
            "training.batch_size": self.micro_batch * self.accumulation,
            **{key: yaml.safe_load(value) for key, value in given.items()},
        }

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Lengths and trained tokens of one micro-batch, which every micro-batch is made of."""
        from measured_step import layout_of, worst_rows

        trained = self.length * 3 // 4 if self.trained is None else self.trained
        segments = layout_of(self.resolved()).sequences
        return worst_rows(self.micro_batch, self.length, trained, padded=self.padded, segments=segments)

    def resolved(self) -> Any:
        """The checked config."""
        from measured_step import config_of

        return config_of(self.config)

    def build_architecture(self) -> Any:
        """The transformers config."""
        from measured_step import architecture_of

        from finetune.model.structure import sequence_head

        found, labels = architecture_of(ARCHITECTURES[self.architecture]), self.resolved().model.labels
        return sequence_head.want(found, labels) if labels else found


_S = Setting
_256, _512, _1024 = (256, 256), (512, 512), (768, 1024)
_FP32 = "quantization.kind=none training.precision=fp32"
_BF16 = "quantization.kind=none"
_INT8 = "quantization.kind=int8"
# Small tiles of logits, so that the experts decide.
_EXPERTS = "memory.loss_tokens=16"
_FULL = "adapter.kind=none quantization.kind=none"
_SMALL_TILES = "memory.loss_tokens=8"
_FUSED = "kernels.fused='on'"
_DROPOUT = "adapter.dropout=0.1 adapter.rslora=true kernels.fused=auto"
_KEPT = "memory.checkpointing=none"
_MIXED = 'memory.checkpointing={"none":1,"all":1}'
_PACKED = "data.packing=true"
_MXFP4 = "quantization.kind=mxfp4"
_FP8 = "quantization.kind=fp8"
_Q4_K_M, _Q5_K_M, _Q8_0 = (f"quantization.kind={kind}" for kind in ("q4_k_m", "q5_k_m", "q8_0"))
_IN_STEP = "training.objective=dpo preference.reference=in_step"
_CACHED = "training.objective=dpo preference.reference=cached"
_REWARD = "training.objective=reward model.labels=[reward] adapter.extra_modules=[score]"
SETTINGS = (
    # Llama: the levers one after the other around QLoRA's defaults.
    _S("llama nf4", "llama", 256, 2),
    _S("llama nf4, one row", "llama", 512),
    _S("llama nf4, unpadded", "llama", 256, 2, padded=False),
    _S("llama nf4 single", "llama", 256, 2, 2, "quantization.double=false optimizer.kind=adamw_8bit"),
    _S("llama fp4", "llama", 384, 2, 1, "quantization.kind=fp4 optimizer.kind=adamw_32bit"),
    _S("llama int8", "llama", 256, 2, 1, _INT8),
    _S("llama q4_k_m", "llama", 256, 2, 1, _Q4_K_M),
    _S("llama q5_k_m fused, no checkpointing", "llama", 256, 2, 1, f"{_Q5_K_M} {_FUSED} {_KEPT}"),
    _S("llama q8_0, evaluated", "llama", 256, 2, 1, f"{_Q8_0} data.eval=rows"),
    _S("llama int8, no checkpointing", "llama", 256, 2, 2, f"{_INT8} memory.checkpointing=none adapter.dropout=0.05"),
    _S("llama bf16", "llama", 256, 4, 1, f"{_BF16} optimizer.kind=adamw_torch_fused"),
    _S("llama fp32", "llama", 256, 2, 1, f"{_FP32} optimizer.kind=adamw_torch_fused"),
    _S("llama nf4 in fp32", "llama", 256, 2, 1, "training.precision=fp32 optimizer.kind=lion_8bit"),
    _S("llama, no checkpointing", "llama", 256, 2, 1, "memory.checkpointing=none"),
    _S("llama, every second layer", "llama", 512, 1, 2, "memory.checkpointing=every-2 adapter.rank=4"),
    _S("llama, two layers", "llama", 512, 2, 1, "memory.checkpointing=2 adapter.rank=64"),
    _S("llama, products and attention kept", "llama", 512, 2, 1, "memory.checkpointing=keep-both"),
    _S("llama eager", "llama", 256, 2, 1, "model.attention=eager"),
    _S("llama eager, no checkpointing", "llama", 256, 2, 1, "model.attention=eager memory.checkpointing=none"),
    _S("llama, evaluated", "llama", 256, 2, 1, "data.eval=rows adapter.dtype=bfloat16"),
    _S("llama, few trained tokens", "llama", 512, 2, 1, "optimizer.kind=adafactor", trained=32),
    _S("llama, every token trained", "llama", 512, 1, 2, "optimizer.kind=sgd", trained=512),
    _S("llama dora", "llama", 256, 2, 1, "adapter.dora=true"),
    _S("llama int8 dora", "llama", 256, 2, 1, f"{_INT8} adapter.dora=true memory.loss_tokens=16"),
    _S("llama, whole", "llama", 128, 2, 1, f"{_FULL} optimizer.kind=adamw_torch_fused"),
    _S("llama, whole in bfloat16", "llama", 128, 2, 2, f"{_FULL} adapter.dtype=bfloat16 optimizer.kind=adamw_8bit"),
    # Many heads, many layers, a small vocabulary.
    _S("mha nf4", "llama-mha", 256, 4, 1, "adapter.rank=8"),
    _S("mha, eight short rows", "llama-mha", 64, 8, 4, "optimizer.kind=ademamix_8bit"),
    _S("mha, long row", "llama-mha", 1024, 1, 1, "memory.checkpointing=every-2"),
    _S("mha fp32, no checkpointing", "llama-mha", 256, 2, 1, f"{_FP32} memory.checkpointing=none optimizer.kind=sgd"),
    _S("mha int8, every second layer", "llama-mha", 512, 2, 1, f"{_INT8} memory.checkpointing=every-2"),
    _S("mha, whole, no checkpointing", "llama-mha", 256, 1, 4,
       f"{_FULL} memory.checkpointing=none training.precision=fp32"),
    # A wide model.
    _S("wide nf4", "llama-wide", 256, 2, 1, "adapter.rank=64"),
    _S("wide, whole, sgd", "llama-wide", 64, 4, 1, f"{_FULL} optimizer.kind=sgd training.precision=fp32"),
    # A large vocabulary: the head decides.
    _S("32k nf4", "llama-32k", 256, 2),
    _S("32k fp32, evaluated", "llama-32k", 256, 2, 1, f"{_FP32} data.eval=rows"),
    _S("32k, extra head", "llama-32k", 128, 2, 2, "adapter.extra_modules=[lm_head] optimizer.kind=adamw_8bit"),
    _S("32k, whole", "llama-32k", 128, 1, 1, f"{_FULL} optimizer.kind=adamw_8bit"),
    # Qwen: biases, then norms on queries and keys.
    _S("qwen2 nf4", "qwen2", 256, 2, 2, "adapter.dropout=0.1"),
    _S("qwen2 fp4 single", "qwen2", 512, 1, 1, "quantization.kind=fp4 quantization.double=false data.eval=rows"),
    _S("qwen2 int8", "qwen2", 256, 4, 1, f"{_INT8} optimizer.kind=adamw_32bit"),
    _S("qwen2 bf16 dora", "qwen2", 256, 2, 1, f"{_BF16} adapter.dora=true memory.checkpointing=none"),
    _S("qwen2, embeddings trained", "qwen2", 256, 2, 1, "adapter.extra_modules=[embed_tokens]"),
    _S("qwen3 nf4", "qwen3", 256, 4, 1, "memory.checkpointing=3"),
    _S("qwen3 fp32", "qwen3", 256, 2, 1, f"{_FP32} model.attention=eager data.eval=rows"),
    _S("qwen3, lion", "qwen3", 128, 8, 1, "optimizer.kind=lion_8bit memory.checkpointing=none"),
    _S("qwen3, whole", "qwen3", 128, 2, 2, f"{_FULL} adapter.dtype=bfloat16 optimizer.kind=adamw_torch_fused"),
    # Gemma: softcaps and eager attention, then sliding windows and a very large vocabulary.
    _S("gemma2 nf4", "gemma2", 256, 2),
    _S("gemma2, no checkpointing", "gemma2", 256, 2, 1, "memory.checkpointing=none optimizer.kind=ademamix_8bit"),
    _S("gemma2 bf16, evaluated", "gemma2", 384, 1, 2, f"{_BF16} data.eval=rows adapter.rank=8"),
    _S("gemma3 nf4", "gemma3", 256, 2),
    _S("gemma3 int8", "gemma3", 512, 1, 1, f"{_INT8} memory.checkpointing=none"),
    # Mistral: with a window shorter than the row, and without one.
    _S("mistral window, eager", "mistral", 256, 2, 1, "model.attention=eager memory.checkpointing=none"),
    _S("mistral fp32", "mistral-full", 256, 2, 2, f"{_FP32} optimizer.kind=adamw_32bit"),
    _S("mistral bf16, rslora", "mistral-full", 512, 1, 1, f"{_BF16} adapter.rslora=true adapter.dropout=0.1"),
    # Phi: fused projections; biases and a partial rotary embedding.
    _S("phi3 nf4", "phi3", 256, 2, 1, "adapter.dtype=bfloat16"),
    _S("phi3 int8, no checkpointing", "phi3", 256, 2, 1, f"{_INT8} memory.checkpointing=none"),
    _S("phi nf4", "phi", 256, 2, 1, "data.eval=rows"),
    _S("phi fp32, eager", "phi", 256, 1, 2, f"{_FP32} model.attention=eager memory.checkpointing=2"),
    # Mixtures of experts.
    _S("qwen3-moe nf4", "qwen3-moe", 256, 2),
    _S("qwen3-moe fp32, no checkpointing", "qwen3-moe", 128, 2, 2, f"{_FP32} memory.checkpointing=none"),
    _S("qwen3-moe, experts nf4", "qwen3-moe-wide", 64, 1, 1, _EXPERTS),
    _S("qwen3-moe, experts nf4, no checkpointing", "qwen3-moe-wide", 64, 1, 1, f"{_EXPERTS} memory.checkpointing=none"),
    _S("qwen3-moe, experts fp4 single", "qwen3-moe-wide", 64, 2, 1,
       f"{_EXPERTS} quantization.kind=fp4 quantization.double=false memory.checkpointing=every-2 data.eval=rows"),
    _S("mixtral nf4", "mixtral", 256, 2, 1, "optimizer.kind=adamw_32bit"),
    _S("mixtral bf16, evaluated", "mixtral", 512, 1, 1, f"{_BF16} data.eval=rows"),
    # Packed rows: each attended to by itself, with a mask of its own where its window or plain attention needs one.
    _S("llama nf4, packed", "llama", 128, 4, 2, "data.packing=true", padded=False),
    _S("mistral window, packed", "mistral", 256, 2, 1, f"data.packing=true {_BF16}", padded=False),
    _S("gemma2 packed, no checkpointing", "gemma2", 256, 2, 1,
       "data.packing=true memory.checkpointing=none", padded=False),
    _S("mixtral packed, evaluated", "mixtral", 128, 2, 1, f"data.packing=true {_BF16} data.eval=rows", padded=False),
    # Above 100 million parameters.
    _S("110m nf4", "llama-110m", 256, 2, 1, "optimizer.kind=adamw_8bit"),
    _S("120m int8, no checkpointing", "qwen2-120m", 256, 1, 1, f"{_INT8} memory.checkpointing=none"),
    _S("110m bf16, evaluated", "llama-110m", 128, 2, 1, f"{_BF16} data.eval=rows adapter.rank=64"),
    _S("120m fp32, whole", "mistral-120m", 256, 1, 1, f"{_FULL} training.precision=fp32"),
    # Small tiles of logits: the layers decide. Each architecture once,
    *(_S(f"{name}, small tiles", name, 512, 1, 1, _SMALL_TILES) for name in SMALL if name != "small-llama-deep"),
    # every lever,
    *(
        _S(f"small tiles, {name}", "small-llama", 512, 1, 1, f"{_SMALL_TILES} {overrides}")
        for name, overrides in {
            "bf16": _BF16,
            "fp32": _FP32,
            "int8": _INT8,
            "fp4": "quantization.kind=fp4",
            "nf4 single": "quantization.double=false",
            "no checkpointing": "memory.checkpointing=none",
            "products kept": "memory.checkpointing=keep-products",
            "attention kept, fp32": f"{_FP32} memory.checkpointing=keep-attention",
            "eager": "model.attention=eager",
            "evaluated": "data.eval=rows",
            "bf16, evaluated": f"{_BF16} data.eval=rows",
            "dora": "adapter.dora=true",
            "dropout": "adapter.dropout=0.1",
            "rank 64": "adapter.rank=64",
            "rank 4 in bfloat16": "adapter.rank=4 adapter.dtype=bfloat16",
            "whole": f"{_FULL} optimizer.kind=adamw_torch_fused",
        }.items()
    ),
    _S("small tiles, deep", "small-llama-deep", 512, 1, 1, _SMALL_TILES),
    _S("small tiles, deep, every second layer", "small-llama-deep", 512, 1, 2,
       f"{_SMALL_TILES} memory.checkpointing=every-2"),
    _S("small tiles, uneven rows", "small-llama", 256, 4, 1, _SMALL_TILES),
    _S("small tiles, packed", "small-llama", 128, 4, 1, f"{_SMALL_TILES} data.packing=true", padded=False),
    _S("small tiles, window packed", "small-mistral", 256, 2, 1, f"{_SMALL_TILES} data.packing=true", padded=False),
    # and long rows.
    *(
        _S(f"{name}, 2048 tokens", name, 2048, 1, 1, "memory.loss_tokens=32")
        for name in ("small-llama", "small-phi3", "small-qwen2", "olmo2", "glm4", "gpt2", "deepseek_v3")
    ),
    _S("2048 tokens, bf16, no checkpointing", "small-llama", 2048, 1, 1,
       f"{_BF16} memory.checkpointing=none memory.loss_tokens=32"),
    _S("2048 tokens, fp32", "small-llama", 2048, 1, 1, f"{_FP32} memory.loss_tokens=32"),
    _S("2048 tokens, int8", "small-qwen2", 2048, 1, 1, f"{_INT8} memory.loss_tokens=32"),
    _S("2048 tokens, evaluated", "small-qwen3", 2048, 1, 1, "data.eval=rows memory.loss_tokens=32"),
    # Fused kernels: every kind of base weight, each architecture's own structure, every lever that meets them.
    *(
        _S(f"fused {name}", architecture, length, rows, 1, f"{_FUSED} {overrides}")
        for name, architecture, length, rows, overrides in (
            ("llama nf4", "llama", 256, 2, ""),
            ("llama nf4, no checkpointing", "llama", 256, 2, "memory.checkpointing=none"),
            ("llama fp32", "llama", 256, 2, _FP32),
            ("llama bf16, two layers", "llama", 256, 2, f"{_BF16} memory.checkpointing=2"),
            ("llama int8", "llama", 256, 2, _INT8),
            ("llama, evaluated", "llama", 256, 2, "data.eval=rows adapter.dtype=bfloat16"),
            ("llama, dropout", "llama", 256, 2, "adapter.dropout=0.1"),
            ("ministral3, dropout, rslora", "ministral3", 512, 1, f"{_SMALL_TILES} {_DROPOUT}"),
            ("qwen2 nf4", "qwen2", 256, 2, ""),
            ("qwen3 nf4, small tiles", "small-qwen3", 512, 1, _SMALL_TILES),
            ("gemma2, small tiles", "small-gemma2", 512, 1, f"{_SMALL_TILES} memory.checkpointing=none"),
            ("gemma3, small tiles", "small-gemma3", 512, 1, _SMALL_TILES),
            ("phi3, small tiles", "small-phi3", 512, 1, _SMALL_TILES),
            ("granite, small tiles", "granite", 512, 1, f"{_SMALL_TILES} {_BF16}"),
            ("olmo2, small tiles", "olmo2", 512, 1, _SMALL_TILES),
            ("mixtral nf4", "mixtral", 256, 2, ""),
            ("llama, small tiles", "small-llama", 512, 1, _SMALL_TILES),
            ("llama, small tiles, none, int8", "small-llama", 512, 1,
             f"{_SMALL_TILES} {_INT8} memory.checkpointing=none"),
            ("llama, 2048 tokens", "small-llama", 2048, 1, "memory.loss_tokens=32"),
            ("mistral window, 2048 tokens", "small-mistral", 2048, 1, "memory.loss_tokens=32"),
            ("llama, 8192 tokens in tiles", "small-llama", 8192, 1, "memory.loss_tokens=32"),
        )
    ),
    _S("fused llama, packed", "small-llama", 128, 4, 1, f"{_FUSED} {_SMALL_TILES} data.packing=true", padded=False),
    # Preferences: micro-batches of as many pairs, each of two sequences. Where the reference is cached they are all
    # alike: the pass takes the longest first, and not the rows with the most trained tokens, by which it is forecast.
    _S("dpo nf4, in step", "llama", 256, 2, 1, _IN_STEP),
    _S("dpo nf4, cached", "llama", 256, 1, 2, _CACHED),
    _S("dpo bf16, cached, evaluated", "qwen2", 256, 1, 2, f"{_CACHED} {_BF16} data.eval=rows"),
    _S("dpo nf4, in step, packed", "llama", 128, 2, 2, f"{_IN_STEP} data.packing=true", padded=False),
    _S("dpo bf16, cached, packed", "small-llama", 128, 2, 1,
       f"{_CACHED} {_BF16} {_SMALL_TILES} data.packing=true", padded=False),
    _S("dpo, whole", "llama", 128, 1, 1, f"{_CACHED} {_FULL} optimizer.kind=adamw_torch_fused"),
    _S("dpo 110m nf4, cached, fused", "llama-110m", 128, 1, 1, f"{_CACHED} {_FUSED}"),
    _S("simpo nf4, small tiles", "small-llama", 256, 2, 1, f"training.objective=simpo {_SMALL_TILES}"),
    _S("orpo bf16", "qwen3", 256, 1, 1, f"training.objective=orpo {_BF16} memory.checkpointing=none"),
    _S("reward nf4", "llama", 128, 2, 1, _REWARD),
    _S("kto nf4, in step", "llama", 128, 1, 2, "training.objective=kto preference.reference=in_step"),
    # Newer architectures, as they are published: hybrids, indexed attention, bases in MXFP4 and FP8, and adapters on
    # experts.
    *(
        _S(name, architecture, length, rows, 1, f"{_SMALL_TILES} {overrides}", padded="packing=true" not in overrides)
        for name, architecture, length, rows, overrides in (
            ("qwen3.5 nf4", "qwen3_5", 512, 1, ""),
            ("qwen3.5 bf16, no checkpointing", "qwen3_5", 256, 2, f"{_BF16} {_KEPT}"),
            ("qwen3.5 fused, evaluated", "qwen3_5", 256, 2, f"{_FUSED} data.eval=rows"),
            ("qwen3.5 mixture nf4", "qwen3_5_moe", 512, 1, ""),
            ("qwen3.5 mixture bf16, no checkpointing", "qwen3_5_moe", 256, 2, f"{_BF16} {_KEPT}"),
            ("gemma4 nf4", "gemma4", 512, 1, ""),
            ("gemma4 bf16, packed, no checkpointing", "gemma4", 256, 2, f"{_PACKED} {_BF16} {_KEPT}"),
            ("gemma4 fused", "gemma4", 256, 2, _FUSED),
            ("gemma4 mixture nf4, packed", "gemma4_moe", 256, 2, _PACKED),
            ("glm-5 bf16, no checkpointing", "glm_moe_dsa", 256, 2, f"{_BF16} {_KEPT}"),
            ("deepseek v3.2 nf4", "deepseek_v32", 512, 1, ""),
            ("deepseek v3.2 fp8, no checkpointing", "deepseek_v32", 256, 2, f"{_FP8} {_KEPT}"),
            ("deepseek v4 nf4", "deepseek_v4", 512, 1, ""),
            ("deepseek v4 bf16, no checkpointing", "deepseek_v4", 256, 2, f"{_BF16} {_KEPT}"),
            ("gpt-oss mxfp4", "gpt_oss", 512, 1, _MXFP4),
            ("gpt-oss mxfp4, no checkpointing", "gpt_oss", 256, 2, f"{_MXFP4} {_KEPT} adapter.expert_rank=4"),
            ("gpt-oss mxfp4, experts without adapters", "gpt_oss", 256, 2, f"{_MXFP4} {_FUSED} adapter.expert_rank=0"),
            ("smollm3 fused, packed", "smollm3", 256, 2, f"{_PACKED} {_FUSED}"),
            ("smollm3 bf16, no checkpointing", "smollm3", 256, 2, f"{_BF16} {_KEPT}"),
            ("ministral3 fp8", "ministral3", 512, 1, _FP8),
            ("ministral3 packed, one layer kept", "ministral3", 256, 2, f"{_PACKED} {_MIXED}"),
            ("granite 4 nf4", "granitemoehybrid", 512, 1, ""),
            ("granite 4 bf16, no checkpointing", "granitemoehybrid", 256, 2, f"{_BF16} {_KEPT}"),
            ("olmo3 fused, packed", "olmo3", 256, 2, f"{_PACKED} {_FUSED}"),
            ("olmo hybrid nf4, evaluated", "olmo_hybrid", 256, 2, "data.eval=rows"),
            ("phi-4 fused, one layer kept", "phi4", 256, 2, f"{_FUSED} {_MIXED}"),
            ("llama 4 nf4", "llama4", 512, 1, ""),
            ("llama 4 bf16, no checkpointing", "llama4", 256, 2, f"{_BF16} {_KEPT}"),
            ("nemotron-h nf4", "nemotron_h", 512, 1, ""),
            ("nemotron-h bf16, no checkpointing", "nemotron_h", 256, 2, f"{_BF16} {_KEPT}"),
            ("kimi k2 nf4, packed", "kimi_k2", 256, 2, _PACKED),
            ("kimi k2 fp8", "kimi_k2", 512, 1, _FP8),
            ("kimi linear nf4", "kimi_linear", 512, 1, ""),
            ("minimax nf4", "minimax", 512, 1, ""),
            ("minimax m2 bf16, packed", "minimax_m2", 256, 2, f"{_PACKED} {_BF16}"),
            ("lfm2 mixture nf4, no checkpointing", "lfm2_moe", 256, 2, _KEPT),
            # A loop over experts takes the more, the more unevenly tokens are routed.
            ("experts in a loop", "dbrx", 512, 1, _BF16),
            ("experts in a loop, no checkpointing", "dbrx", 256, 2, f"{_BF16} {_KEPT}"),
        )
    ),
    # Images: of several sizes and several a row, and rows of text beside them.
    *(
        _S(name, architecture, length, len(images), 1, f"{_SMALL_TILES} {overrides}", images=images)
        for name, architecture, length, images, overrides in (
            ("qwen3-vl nf4, 256 px", "qwen3-vl", 256, ((_256,),), ""),
            ("qwen3-vl nf4, 512 px", "qwen3-vl", 320, ((_512,),), ""),
            ("qwen3-vl nf4, 1024 x 768 px", "qwen3-vl", 800, ((_1024,),), ""),
            ("qwen3-vl bf16, wide and tall", "qwen3-vl", 320, (((96, 640), (640, 96)),), _BF16),
            ("qwen3-vl bf16, no checkpointing, 2 rows", "qwen3-vl", 320, ((_512,), (_256,)), f"{_BF16} {_KEPT}"),
            ("qwen3-vl nf4, text beside images", "qwen3-vl", 320, ((), (_256, _256), (_512,), ()), ""),
            ("qwen3-vl fused, evaluated", "qwen3-vl", 320, ((_512,), ()), f"{_FUSED} data.eval=rows"),
            ("qwen3-vl fp32, one layer kept", "qwen3-vl", 320, ((_512,),), f"{_FP32} {_MIXED}"),
            ("gemma3-vl nf4", "gemma3-vl", 256, ((_256,),), ""),
            ("gemma3-vl nf4, three images", "gemma3-vl", 320, ((_256, _512, _1024),), ""),
            ("gemma3-vl bf16, no checkpointing, 2 rows", "gemma3-vl", 256, ((_512,), (_256,)), f"{_BF16} {_KEPT}"),
            ("gemma3-vl nf4, text beside images", "gemma3-vl", 256, ((_512, _256), (), (), (_256,)), ""),
            ("gemma3-vl fused, evaluated", "gemma3-vl", 256, ((_512,), ()), f"{_FUSED} data.eval=rows"),
            ("gemma3-vl fp32, one layer kept", "gemma3-vl", 256, ((_512,),), f"{_FP32} {_MIXED}"),
            ("idefics3 nf4", "idefics3", 384, ((_256,),), ""),
            ("idefics3 nf4, two images", "idefics3", 640, ((_512, _1024),), ""),
            ("idefics3 bf16, wide", "idefics3", 384, (((96, 640),),), _BF16),
            ("idefics3 bf16, no checkpointing, 2 rows", "idefics3", 384, ((_512,), ((96, 640),)), f"{_BF16} {_KEPT}"),
            ("idefics3 nf4, text beside images", "idefics3", 384, ((), (_512,), (_1024,), ()), ""),
            ("idefics3 fused, evaluated", "idefics3", 384, ((_512,), ()), f"{_FUSED} data.eval=rows"),
            ("idefics3 fp32, one layer kept", "idefics3", 384, ((_512,),), f"{_FP32} {_MIXED}"),
            ("qwen2-vl bf16, no checkpointing", "qwen2-vl", 384, ((_512,),), f"{_BF16} {_KEPT}"),
            ("qwen2.5-vl nf4, text beside images", "qwen2.5-vl", 384, ((_512,), (), (_256,)), ""),
            ("qwen3.5-vl nf4, two images", "qwen3.5-vl", 384, ((_512, _256),), ""),
            ("gemma4-vl nf4, 2 rows", "gemma4-vl", 256, ((_512, _256), (_1024,)), ""),
            ("smolvlm bf16, text beside images", "smolvlm", 384, ((_512,), (), (_256,)), _BF16),
            ("internvl nf4, two images", "internvl", 384, ((_512, _256),), ""),
        )
    ),
)  # fmt: skip
assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


def measure(setting: Setting) -> dict[str, int]:
    import measured_step

    config, architecture = setting.resolved(), setting.build_architecture()
    found = measured_step.measure(config, architecture, setting.rows, padded=setting.padded, images=setting.images)
    return peaks(found.peak_allocated_bytes, found.phases)


def peaks(peak_allocated_bytes: int, phases: Mapping[str, int]) -> dict[str, int]:
    """What a result keeps of a setting's bytes, measured or forecast: the peak, and that of each phase compared."""
    return {"peak": peak_allocated_bytes, **{phase: phases[phase] for phase in COMPARED if phase in phases}}


def step_settings(setting: Setting) -> list[Any]:
    """The steps of `setting` as the forecast traces them, one for each of its largest batches."""
    import torch
    from measured_step import STEPS, by_row, shared

    from finetune.data.batching import Sizes, worst_batches
    from finetune.data.media import TEXT_ALONE
    from finetune.data.prepare import media_of
    from finetune.forecast import devices
    from finetune.forecast.traced_step import StepSetting
    from finetune.model.attention import backends
    from finetune.model.source.tokenizer import load_tokenizer
    from finetune.training.collator import micro_batching

    config, architecture = setting.resolved(), setting.build_architecture()
    torch.set_num_threads(1)  # kernels have room for each thread
    way, rows = micro_batching(config, architecture), by_row(config, setting.rows)
    data = rows * (
        1 if setting.images else STEPS
    )  # of which the run takes the largest in its warm-up, whatever the order
    media = TEXT_ALONE
    if setting.images:
        media = media_of(config.model, config.data, load_tokenizer(config.model), architecture)
    columns: dict[str, Any] = {
        "length": [sum(length for length, _ in row) for row in data],
        "trained": [sum(trained for _, trained in row) for row in data],
        "segments": [[length for length, _ in row] for row in data],
        "shared": [*map(shared, data)],
    }
    sizes = Sizes.of(columns, way)
    if media:
        sizes = dataclasses.replace(sizes, images=[processors.seen(media, own) for own in setting.images])
    batches = worst_batches(sizes, way, len(rows), "the setting")
    attention = backends.planned(
        config.model.attention, architecture, "cpu", config.training.precision, packed=config.data.packing,
        longest=config.data.max_length,
    )  # fmt: skip
    card, held_out = devices.find("cpu", config.memory), config.data.eval != "none"
    return [
        StepSetting(config, architecture, batch, batch if held_out else None, card, attention, media=media)
        for batch in batches
    ]


def forecast(setting: Setting) -> dict[str, int]:
    """Forecast bytes of `setting`, as `peaks` gives them."""
    return forecast_range(setting)["forecast"]


def forecast_range(setting: Setting) -> dict[str, dict[str, int]]:
    """The forecast of `setting`; where routing matters, beside that `evenly` routed."""
    from finetune.forecast.traced_step import trace_step

    steps = step_settings(setting)
    traces = [*map(trace_step, steps)]
    found = {"forecast": _most([*map(_peaks_of, steps, traces)])}
    if any(trace.routed for trace in traces):
        evenly = [dataclasses.replace(step, evenly=True) for step in steps]
        found["evenly"] = _most([_peaks_of(step, trace_step(step)) for step in evenly])
    return found


def _most(peaks: Sequence[dict[str, int]]) -> dict[str, int]:
    """The largest peak of each phase."""
    return {phase: max(each[phase] for each in peaks) for phase in peaks[0]}


def _peaks_of(step: Any, trace: Any) -> dict[str, int]:
    from finetune.forecast import file_sizes, job_forecast, replay

    accumulation = step.config.training.batch_size // step.config.training.rows
    run = replay.RunSetting(micro_batches=accumulation, checkpoint_bytes=file_sizes.checkpoint_bytes(trace))
    found = job_forecast.make(trace, step.device, step.train, step.attention, run)
    phases = {name: peak["allocated_bytes"] for name, peak in found.phases.items()}
    # The instrument's peak begins with the finished model.
    return peaks(max(size for name, size in phases.items() if name != "load"), phases)


def main() -> None:
    options = _options()
    chosen = named(options.only) if options.only else SETTINGS
    import measured_step  # noqa: F401  (before the first fork, so that each process has it at once)

    before = harness.saved(options.measured, "settings") if options.measured else {}
    # Some settings are measured again beside what stands in the file of the others.
    rows = dict(harness.saved(options.output, "settings")) if options.only else {}
    rows |= {setting.name: _row(setting, options.measure_only, before.get(setting.name)) for setting in chosen}
    result = {"summary": summary(rows), "settings": rows}
    harness.save(options.output, result, threads=1)
    print(_table(result))
    sys.exit(1 if result["summary"]["failed"] else 0)


def named(names: Iterable[str], settings: Iterable[Any] = SETTINGS) -> list[Any]:
    """The settings of these names; ends the script at a name that none has."""
    by_name = {setting.name: setting for setting in settings}
    if unknown := set(names) - by_name.keys():
        sys.exit(f"no setting named {', '.join(unknown)}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in names]


def measured_peaks(result: Path | None) -> dict[str, int]:
    """The peaks in bytes that a result of this benchmark measured, by setting; none without a result."""
    rows = harness.saved(result, "settings") if result else {}
    return {name: row["measured"]["peak"] for name, row in rows.items() if "measured" in row}


def _row(setting: Setting, measure_only: bool, before: dict[str, Any] | None) -> dict[str, Any]:
    """One setting, measured (or taken from `before`) and forecast; `error` where one of the two could not be done."""
    started = time.perf_counter()
    row: dict[str, Any] = {"architecture": setting.architecture}
    try:
        if before is not None:
            row |= {key: before[key] for key in _MEASURED if key in before}
        else:
            row["measured"] = apart(measure, setting)
            row["measured_in_seconds"] = round(time.perf_counter() - started, 1)
        if not measure_only:
            found = apart(forecast_range, setting)
            row |= found if found.get("evenly") != found["forecast"] else {"forecast": found["forecast"]}
            row["relative_errors"] = relative_errors(row["forecast"], row["measured"], row.get("evenly"))
    except Failed as failure:
        row["error"] = harness.without_paths(str(failure))
    _say(setting, row)
    return row


def relative_errors(
    forecast: dict[str, int], measured: dict[str, int], evenly: dict[str, int] | None = None
) -> dict[str, float]:  # fmt: skip
    """Forecast over measured, less 1: for the peak, and for each phase that both have.

    With `evenly` it is the nearer end of the range between both forecasts, and 0 within.
    """
    ranges = {name: sorted((size, (evenly or forecast)[name])) for name, size in forecast.items()}
    nearest = {
        name: min(max(found, ranges[name][0]), ranges[name][1]) for name, found in measured.items() if name in ranges
    }
    return {name: round(size / measured[name] - 1, 5) for name, size in nearest.items()}


# Of what was measured: how far off a peak may be, and how far below.
LARGEST_ERROR, UNDER_PREDICTION = 0.01, 0.005
_MEASURED = ("measured", "measured_in_seconds")
COMPARED = ("load", "reference", "forward", "backward", "optimizer", "evaluation", "save")


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many settings and architectures, how many failed, and how far the forecasts are off (below 0: too little)."""
    errors = {name: row["relative_errors"] for name, row in rows.items() if "relative_errors" in row}
    return {
        "settings": len(rows),
        "architectures": len({ARCHITECTURES[row["architecture"]]["model_type"] for row in rows.values()}),
        "failed": [name for name, row in rows.items() if "error" in row],
        "compared": len(errors),
        **(_spread({name: one["peak"] for name, one in errors.items()}) if errors else {}),
        "phases": {
            phase: _spread(found)
            for phase in COMPARED
            if (found := {name: one[phase] for name, one in errors.items() if phase in one})
        },
    }


def _spread(errors: dict[str, float]) -> dict[str, Any]:
    """The errors of peaks, by setting, and which of them are outside of the bounds."""
    least, farthest = min(errors, key=errors.__getitem__), max(errors, key=lambda name: abs(errors[name]))
    return {
        "outside": sorted(name for name, error in errors.items() if not -UNDER_PREDICTION <= error <= LARGEST_ERROR),
        "largest_error": {"setting": farthest, "error": errors[farthest]},
        "worst_under_prediction": {"setting": least, "error": min(errors[least], 0.0)},
        "median_absolute_error": statistics.median(map(abs, errors.values())),
    }


# -- processes ---------------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A setting's process ended without a result; the message is its error."""


def apart(function: Callable[[Setting], Any], setting: Setting) -> Any:
    """`function(setting)` in a process of its own, forked: the libraries, seconds to import, are there already."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), initializer=_silence) as process:
        try:
            return process.submit(function, setting).result()
        except (Exception, SystemExit) as error:  # BrokenProcessPool where the process was killed
            raise Failed(f"{type(error).__name__}: {error}"[-1000:]) from error


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _say(setting: Setting, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{setting.name}: FAILED: {row['error'][:300]}", flush=True)
        return
    measured = row["measured"]
    said = f"peak {measured['peak'] / 2**20:.1f} MiB in {row['measured_in_seconds']} s"
    if "relative_errors" in row:
        said += ", forecast " + " ".join(
            f"{phase} {100 * error:+.2f} %" for phase, error in row["relative_errors"].items()
        )
    print(f"{setting.name}: {said}", flush=True)


def _table(result: dict[str, Any]) -> str:
    def line(name: str, row: dict[str, Any]) -> tuple[str, ...]:
        if "measured" not in row:
            return (name, "failed", *[""] * (len(columns)))
        sizes = ("" if (size := row["measured"].get(column)) is None else f"{size / 2**20:.1f}" for column in columns)
        error = row.get("relative_errors", {}).get("peak")
        return (name, *sizes, "" if error is None else f"{100 * error:+.2f} %")

    columns = (*COMPARED, "peak")
    rows = [line(name, row) for name, row in result["settings"].items()]
    return harness.table(("MiB", *columns, "forecast"), rows) + "\n" + json.dumps(result["summary"], indent=2)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__, "forecast_cpu.json")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this setting, beside the others'")
    parser.add_argument("--measured", type=Path, help="take what was measured from an earlier result, forecast anew")
    parser.add_argument("--measure-only", action="store_true", help="measure without forecasting")
    return parser.parse_args()


if __name__ == "__main__":
    main()
