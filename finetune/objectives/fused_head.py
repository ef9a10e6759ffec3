"""A model's output head that scores labels in tiles, without materialising the logits.

`model(**batch, fused_lm_head=True)` is what TRL's trainers call it as well (`add_fused_lm_head`, trl 1.16).
"""

from __future__ import annotations

import functools
import types
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from finetune.data.encoded import IGNORE
from finetune.forms.packed import packing_of
from finetune.kernels.head import Logits, Tile, dtype_of, log_probs, log_probs_of_words
from finetune.model.structure import experts
from finetune.runtime import patches

tile = ContextVar("tile", default=Tile())  # noqa: B039 -- it is frozen
"""The tile of logits of a pass; `model_setup.in_training` sets it, by `log_probs.tiles`."""


@dataclass
class TokenScores(ModelOutput):
    """`log_probs` and `label_mask` (rows, tokens - 1): zero and False where the label is -100; `aux_loss` ().

    `loss` (): the mean cross-entropy of the labels, with `aux_loss`, as the model's own. `of_words` (labels, k): the
    log-probabilities of the ids in `words` (rows, tokens, k) where there is a label, if asked for.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None
    of_words: Tensor | None = None


def add(model: Any) -> None:
    """Make `model(**batch, fused_lm_head=True)` return `TokenScores` of `labels`, or of shifted `shift_labels`.

    Without that argument the forward pass stays the model's own.
    """
    plain, text = model.forward, model.config.get_text_config()

    @functools.wraps(type(model).forward)  # `generate` looks at the signature
    def forward(
        model: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None,
        shift_labels: Tensor | None = None, words: Tensor | None = None, **inputs: Any,
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
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]  # see `encoded.IGNORE`
            words = None if words is None else words[:, 1:]
        scores = scored(model, hidden, shift_labels, words)
        assert scores.log_probs is not None
        assert scores.label_mask is not None
        loss, balance = -scores.log_probs.sum() / scores.label_mask.sum().clamp(min=1), None
        if balanced:
            balance = experts.balancing_loss(output.router_logits, text, inputs)
            loss = loss + getattr(text, "router_aux_loss_coef", 0.0) * balance
        scores.loss, scores.aux_loss = loss, balance
        return scores

    patches.CAUSAL_MODEL_FORWARD.put(types.MethodType(forward, model), model)


def scored(model: Any, hidden: Tensor, labels: Tensor, words: Tensor | None = None) -> TokenScores:
    """The scores of `labels` (rows, tokens), and of `words` at labelled ones, from states (rows, tokens, width)."""
    head = model.get_output_embeddings()  # looked up in each pass, because FSDP and PEFT replace it
    hidden, labels = hidden.to(head.weight.device), labels.to(head.weight.device)
    weight, bias = (  # FSDP2's shards are gathered once, before the tokens are divided
        one.full_tensor() if hasattr(one, "full_tensor") else one for one in (head.weight, head.bias)
    )
    if how := packing_of(weight):
        weight = how.decoded(weight.data, dtype_of(hidden))
    text, mask = model.config.get_text_config(), labels != IGNORE
    given = hidden[mask], weight, bias, labels[mask], logits_of(text), tile.get()
    found = log_probs(*given)
    # Also without any label, the result is a function of the model's weights.
    scores = TokenScores(log_probs=found.new_zeros(mask.shape).masked_scatter(mask, found), label_mask=mask)
    if words is not None:
        scores.of_words = log_probs_of_words(*given, found, words[mask])
    return scores


def logits_of(text: Any) -> Logits:
    """What a model with this config of its decoder does to its logits: their cap, and their factor, which configs name
    in four ways.
    """
    names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
    scales = [scale for name in names if (scale := getattr(text, name, None)) is not None]
    if not scales and (scaling := getattr(text, "logits_scaling", None)) is not None:
        # Granite and MiniCPM3 divide by it.
        scales = [scaling if text.model_type == "hyperclovax" else 1 / scaling]
    return Logits(getattr(text, "final_logit_softcapping", None), float(scales[0]) if scales else 1.0)
