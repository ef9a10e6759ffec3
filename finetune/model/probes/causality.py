"""Checks that a model is causal, so that it needs no padding mask.

Rows are padded on the right. If no token attends to a later one, no real token attends to padding, and a padding mask
changes neither loss nor gradient. It would still have a cost: with a mask, scaled_dot_product_attention cannot use its
flash kernel, computes the upper half of the scores too, and needs keys and values repeated for each query head
(transformers 5.24, `use_gqa_in_sdpa`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from finetune.errors import ArtifactError, ConfigError, NumbersError
from finetune.model import bounds, probes
from finetune.model.attention.backends import has_flash

# Allowed relative change of a row's logits when later tokens change. In a causal model it is zero, except for rounding
# in a mixture of experts, whose matrix products then have other shapes.
_MOVES = 0.02


def needs_mask(config: Any, precision: str, capability: tuple[int, int] | None) -> bool:
    """Whether a causal model gets a padding mask anyway.

    `config` is the model's, `capability` the GPU's compute capability (None for a CPU). The load-balancing loss of a
    mixture of experts uses it to count real tokens. And if SDPA has no flash kernel, grouped-query attention without a
    mask materialises the whole score matrix; with one, transformers repeats the keys and the memory-efficient kernel
    runs.
    """
    routed = bool(getattr(config.get_text_config(), "output_router_logits", False))
    return routed or not has_flash(precision, capability)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of `device`; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def prove(model: Any) -> None:
    """Check on `model` itself that a row's logits do not depend on later tokens.

    Runs two short forward passes under the autocast of a step. Raises ArtifactError for a model that is not causal,
    NumbersError if its logits are not finite, and ConfigError if its code fails.
    """
    tokens = min(probes.TOKENS, (bounds.table_size(model) or 2 * probes.TOKENS) // 2)
    # The same row, followed by different tokens.
    row, *ends = probes.rows(3, tokens, model)

    def refusal(error: Exception) -> ConfigError:
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        return ConfigError(
            f"`model.name`: a forward pass of {type(base).__name__} fails with this configuration "
            f"({probes.Failed(error)}); set `quantization.kind: none` and `model.attention: eager`, or use another base"
        )

    with probes.attempt(refusal):
        one, two = (probes.logits(model, input_ids=torch.cat([row, end], dim=1))[:, :tokens] for end in ends)
    moved, size = float((one - two).norm()), float(one.norm())
    if not math.isfinite(moved):
        raise NumbersError("the base's logits are not finite before the first step, though its weights are")
    if moved > _MOVES * size:
        raise ArtifactError(
            f"this model's logits change by {moved / size:.0%} with later tokens: it sees the token it predicts, so it "
            "cannot be trained as a causal language model; use a decoder"
        )
