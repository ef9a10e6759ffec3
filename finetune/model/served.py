"""What follows for a base from the form in which its trained model is served (`finetune.config.serving`)."""

from __future__ import annotations

from typing import Any

from finetune.config import AdapterSection, Config, serving
from finetune.errors import ConfigError
from finetune.model.source import gguf_families, prequantized
from finetune.model.structure import experts

_NVFP4_IN_GGUF = 64
"""Weights of a block of NVFP4 in a GGUF file: four of the format's own."""


def resolved(config: Config, architecture: Any) -> tuple[Config, str | None]:
    """`serving.resolved` and then `prequantized.resolved`, with their notes.

    Raises ConfigError for a base that cannot be served so, and as `prequantized.resolved`.
    """
    config, way = serving.resolved(config)
    if way:
        if prequantized.form(architecture) == "gguf" and config.quantization.kind in (*serving.GGUF, "gguf"):
            config = config.changed({"quantization.kind": "gguf"})
            way = f"{way.partition('; quantization.kind')[0]}; quantization.kind: gguf, the file is what is served"
        _check(config, architecture)
    config, published = prequantized.resolved(config, architecture)
    on_experts = None
    if config.quantization.kind == "gguf" and _adapts_experts(config.adapter, architecture.get_text_config()):
        on_experts = "adapter.expert_rank: llama.cpp takes no adapter on experts; set 0 to serve the file itself"
    return config, "\n".join(filter(None, (way, published, on_experts))) or None


def _check(config: Config, architecture: Any) -> None:
    serve, way, text = str(config.output.serve), config.output.way, architecture.get_text_config()
    published = prequantized.form(architecture)
    in_file = published == config.quantization.kind == "gguf" and way == "adapter"
    if published and way != "rounded" and published != serving.kind_of(serve) and not in_file:
        cure = f"set `{published}`, or `output.way: rounded`"
        if published == "gguf":
            cure = "set `q4_k_m` and `output.way: adapter`, which serves the file itself, or name its 16-bit original"
        raise ConfigError(
            f"`output.serve`: {config.model.name} is published in {prequantized.METHODS[published]}, which is not "
            f"quantized again to {serve}; {cure}"
        )
    if serve in serving.GGUF:
        _check_llama_cpp(config, architecture, text)
    if way == "adapter" and config.output.runtime == "llama.cpp" and _adapts_experts(config.adapter, text):
        raise ConfigError(
            f"`output.way`: llama.cpp has no form for an adapter on the experts of {config.model.name}; set `rounded`, "
            "or `adapter.expert_rank: 0`, which leaves out experts"
        )
    if way == "exact" and published:
        raise ConfigError(
            f"`output.way`: {config.model.name} is published in {prequantized.METHODS[published]}, and most updates "
            "are too small to move such a weight to its next value; set `adapter` or `rounded`"
        )
    block = serving.SERVED[serve].block
    if serve == "nvfp4" and way != "rounded" and config.output.runtime == "llama.cpp":
        block = _NVFP4_IN_GGUF
    widths = {name: getattr(text, name, None) for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")}
    for name, width in widths.items():
        if isinstance(width, int) and width % block:
            raise ConfigError(
                f"`output.serve`: {serve} has blocks of {block} weights, which do not divide the {name} {width} of "
                f"{config.model.name}; set `q8_0` or another form of GGUF files, or `16bit`"
            )
    if (serve, way) == ("nvfp4", "adapter") and published is None and config.output.runtime != "llama.cpp":
        raise ConfigError(
            "`output.way`: servers compute several weights as one, with one factor of NVFP4, and a base that is held "
            "in training has one for each weight; set `rounded`, or train on a base that is published in NVFP4"
        )


def _check_llama_cpp(config: Config, architecture: Any, text: Any) -> None:
    try:
        gguf_families.family(architecture)
    except ConfigError as error:
        raise ConfigError(f"`output.serve`: {error}; set `16bit`, or another form for vLLM") from None
    if config.output.way != "rounded" and getattr(text, "linear_num_value_heads", None):
        raise ConfigError(
            f"`output.way`: llama.cpp stores columns of `linear_attn.out_proj` of {config.model.name} in another "
            "order, in which packed weights and adapters cannot follow; set `rounded`"
        )


def _adapts_experts(section: AdapterSection, text: Any) -> bool:
    return bool(experts.count(text)) and section.targets == "all-linear" and section.expert_rank != 0
