"""A model's output head that scores labels in tiles, without materialising the logits.

What TRL's `add_fused_lm_head` (trl 1.16) does for log-probabilities. Its module imports TRL's trainers, pandas and
datasets, which take a second; the tiled function, which is TRL's, does not.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from finetune.data.encoded import IGNORE
from finetune.kernels.head import ChunkedLogProbFunction, dtype_of
from finetune.model.structure import experts
from finetune.model.structure.packed import packing_of
from finetune.runtime import patches

_COLUMNS = 32768
"""Columns of logits that the tiled function takes at a time."""

tiled: Any = ChunkedLogProbFunction
"""The tiled function of a forward pass."""


@dataclass
class TokenScores(ModelOutput):
    """`log_probs` and `label_mask` (rows, tokens - 1): zero and False where the label is -100; `aux_loss` ().

    `loss` (): the mean cross-entropy of the labels, with `aux_loss`, as the model's own.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


def scores_labelled(device: torch.device) -> bool:
    """Whether only the states that have a label are scored, so that the number of tiles depends on the data."""
    return device.type == "cuda"


def add(model: Any) -> None:
    """Make `model(**batch, fused_lm_head=True)` return `TokenScores` of `labels`, or of shifted `shift_labels`.

    Without that argument the forward pass stays the model's own.
    """
    plain, text = model.forward, model.config.get_text_config()
    softcap, scale = getattr(text, "final_logit_softcapping", None), _scale(text)

    @functools.wraps(type(model).forward)  # `generate` looks at the signature
    def forward(
        model: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None,
        shift_labels: Tensor | None = None, **inputs: Any,
    ) -> Any:  # fmt: skip
        given = {"labels": labels, "shift_labels": shift_labels}
        if not fused_lm_head:
            return plain(*args, **inputs, **{name: value for name, value in given.items() if value is not None})
        balanced = getattr(text, "output_router_logits", False)
        inputs |= {"use_cache": False, **({"output_router_logits": True} if balanced else {})}
        output = model.base_model(*args, **inputs)
        hidden = output.last_hidden_state
        if shift_labels is None:
            assert labels is not None
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        head = model.get_output_embeddings()  # looked up in each pass, because FSDP and PEFT replace it
        log_probs, labelled = _scored(hidden, shift_labels, head, softcap, scale)
        loss, balance = -log_probs.sum() / labelled.sum().clamp(min=1), None
        if balanced:
            balance = experts.balancing_loss(output.router_logits, text, inputs)
            loss = loss + getattr(text, "router_aux_loss_coef", 0.0) * balance
        return TokenScores(loss=loss, log_probs=log_probs, label_mask=labelled, aux_loss=balance)

    patches.CAUSAL_MODEL_FORWARD.put(types.MethodType(forward, model), model)


def _scored(hidden: Tensor, labels: Tensor, head: Any, softcap: float | None, scale: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels` (rows, tokens), and which tokens have one, from states (rows, tokens, width)."""
    hidden, labels = hidden.to(head.weight.device), labels.to(head.weight.device)
    mask = labels != IGNORE
    weight, bias = (  # FSDP2's shards are gathered once, before the tokens are divided
        one.full_tensor() if hasattr(one, "full_tensor") else one for one in (head.weight, head.bias)
    )
    if how := packing_of(weight):
        weight = how.decoded(weight.data, dtype_of(hidden))
    labelled = scores_labelled(hidden.device)
    log_probs, *_ = tiled.apply(
        hidden[mask] if labelled else hidden.flatten(0, 1), weight, bias,
        labels[mask] if labelled else labels.clamp(min=0).flatten(), 1.0, _COLUMNS, softcap, scale, ("log_probs",),
    )  # fmt: skip
    if labelled:  # also without any label, the result is a function of the model's weights
        return log_probs.new_zeros(mask.shape).masked_scatter(mask, log_probs), mask
    return log_probs.view(mask.shape).masked_fill(~mask, 0), mask


def _scale(text: Any) -> float:
    """The factor of the logits, which configs name in four ways; 1 for a model without one."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (scale := getattr(text, name, None)) is not None:
            return float(scale)
    scaling = getattr(text, "logits_scaling", None)  # Granite and MiniCPM3 divide by it
    if scaling is None:
        return 1.0
    return float(scaling if text.model_type == "hyperclovax" else 1 / scaling)
