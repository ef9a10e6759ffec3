"""Training objectives. A new one is a function and its entry in OBJECTIVES, or is given from Python.

An objective is `loss(model, batch) -> (sum, count)`. Both add up over micro-batches, ranks and the halves of a
micro-batch that did not fit, so the gradient of sum / count does not depend on how a step was split (but for that of
`aux_loss`, taken over each micro-batch). `count(batch)` is the same count without the model: a step divides by it
before its first backward pass.

`model(**batch, fused_lm_head=True)` returns, without materialising all logits (`objectives.log_probs`):

    log_probs   (rows, tokens - 1), float32: of each label given the tokens before it; 0 where not trained
    label_mask  (rows, tokens - 1), bool: which tokens are trained
    aux_loss    (), or None: the load-balancing loss of a mixture of experts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from finetune.config.field_types import name_of

if TYPE_CHECKING:
    import torch

Batch = dict[str, Any]
"""The model's keyword arguments: tensors of `input_ids` and `labels` (rows, tokens), and what packing adds."""


Loss: TypeAlias = "Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]"


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Number of trained tokens: labels other than -100, except the first of each row, which nothing predicts."""
    return (batch["labels"][:, 1:] != -100).sum()


@dataclass(frozen=True)
class Objective:
    """A loss function returning a sum with its graph and its count, both on the device; and the count alone."""

    help: str
    loss: Loss
    count: Callable[[Batch], torch.Tensor] = trained_tokens


def supervised(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy, in nats, of each trained token given the tokens before it."""
    scores = model(**batch, fused_lm_head=True)
    return with_balancing(-scores.log_probs.sum(), scores.label_mask.sum(), model, scores)


def with_balancing(
    total: torch.Tensor, count: torch.Tensor, model: Any, scores: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A summed loss and its token count, with a mixture of experts' load-balancing loss added per token.

    It is weighted by the coefficient in the model's own config (arXiv 2101.03961, section 2.2). `scores` is what the
    model returned, with or without its fused head.
    """
    if getattr(scores, "aux_loss", None) is not None:
        config = getattr(model, "module", model).config.get_text_config()
        total = total + config.router_aux_loss_coef * scores.aux_loss * count
    return total, count


OBJECTIVES: dict[str, Objective] = {
    "supervised": Objective("next-token cross-entropy of the trained tokens", supervised, trained_tokens),
}


def given(objective: Loss | Objective) -> str:
    """Add an objective from Python; its name for `training.objective`. A loss alone counts the trained tokens.

    Raises ConfigError for a function without a name.
    """
    if not isinstance(objective, Objective):
        objective = Objective(objective.__doc__ or "given from Python", objective)
    name = name_of(objective.loss)
    OBJECTIVES[name] = objective
    return name
