"""Whether a model is causal, and so whether it needs a padding mask.

Rows are padded on the right. If no token attends to a later one, no real token attends to padding, and a padding mask
does not change the loss or the gradient. It still has a cost: with a mask, scaled_dot_product_attention cannot use its
flash kernel, also computes the upper half of the scores, and needs keys and values repeated for each query head
(transformers 5.23, `use_gqa_in_sdpa`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from finetune.errors import ArtifactError, ConfigError, NumbersError, first_line
from finetune.model import bounds, probes

# The compute capability from which SDPA has a flash kernel.
_FLASH = (8, 0)

# How far a row's logits may move, as a share of their size, when the tokens behind it change: in a causal model not at
# all, but for the rounding of a mixture of experts, whose products then have other shapes.
_MOVES = 0.02


def needs_mask(config: Any, precision: str, capability: tuple[int, int] | None) -> bool:
    """Whether a causal model is given the padding mask all the same.

    `config` is the model's, `capability` the card's compute capability (None for a CPU). The balancing loss of a
    mixture of experts counts real tokens by it. And without SDPA's flash kernel, grouped heads without a mask take the
    whole score matrix; with one, transformers repeats the keys and the memory-efficient kernel runs.
    """
    routed = bool(getattr(config.get_text_config(), "output_router_logits", False))
    return routed or not has_flash(precision, capability)


def has_flash(precision: str, capability: tuple[int, int] | None) -> bool:
    """Whether SDPA has a flash kernel, which takes heads that share keys, on a card or (None) a CPU."""
    return capability is None or (capability >= _FLASH and precision != "fp32")


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of the card that is `device`; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def prove(model: Any) -> None:
    """Check on `model` itself that its logits for a row do not depend on the tokens behind it.

    Two forward passes over some tokens, under the autocast of a step. Raises ArtifactError for a model that looks
    ahead, which next-token prediction cannot train, NumbersError for one whose logits are not finite, and ConfigError
    for one whose code fails.
    """
    tokens = min(probes.TOKENS, (bounds.table_size(model) or 2 * probes.TOKENS) // 2)
    # A row, and other tokens behind it in each.
    row, *ends = probes.rows(3, tokens, model)
    try:
        one, two = (probes.logits(model, input_ids=torch.cat([row, end], dim=1))[:, :tokens] for end in ends)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # of whatever kind: it is the model's code
        raise ConfigError(
            f"`model.name`: a forward pass of {type(model).__name__} fails as it is configured here "
            f"({type(error).__name__}: {first_line(error)}); set `quantization.kind: none` and "
            "`model.attention: eager`, or give another base"
        ) from error
    moved, size = float((one - two).norm()), float(one.norm())
    if not math.isfinite(moved):
        raise NumbersError("the base's logits are not numbers (NaN) before the first step")
    if moved > _MOVES * size:
        raise ArtifactError(
            f"this model's logits change by {moved / size:.0%} with later tokens: it sees the token that it "
            "predicts, so it cannot be trained as a causal language model; use a decoder"
        )
