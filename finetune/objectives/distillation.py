"""Distillation from a teacher's log-probabilities in the rows: the model learns its distribution at each trained token.

The rows have the teacher's k likeliest tokens. All others are one outcome more, with the rest of the probability, so
that the divergence is that of two distributions: 0 where model and teacher agree on these tokens, and at most the one
over the whole vocabulary.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from finetune.config import PreferenceSection
from finetune.data.encoded import RowLayout
from finetune.objectives.objective import Batch, Keys, Objective, Statistics, scored, trained_tokens, with_balancing

if TYPE_CHECKING:
    import torch

STATISTICS = ("cross_entropy",)

# A probability of all other tokens below this counts as zero, since float32 cannot tell the sum of the others from 1.
_LEAST_REST = 1e-6


def divergence(teacher: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence (positions,), in nats, of the model from the teacher (arXiv 2306.13649, equation 2).

    Both are log-probabilities of the same tokens, float32 (positions, k); -inf of the teacher is no token.
    """
    import torch

    there = teacher > -torch.inf
    likely = teacher.exp()
    of_tokens = torch.where(there, likely * (teacher.where(there, 0) - model), 0).sum(1)
    rest = (1 - likely.sum(1)).clamp(min=0)
    of_model = torch.log1p(-torch.where(there, model.exp(), 0).sum(1).clamp(max=1 - _LEAST_REST))
    of_rest = rest * (rest.clamp(min=_LEAST_REST).log() - of_model)
    return of_tokens + of_rest.where(rest > _LEAST_REST, 0)


def _loss(nll_weight: float, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Statistics]:
    """The summed divergence of the trained tokens, with `nll_weight` times their cross-entropy; and their number."""
    scores = scored(model, batch, words=batch["teacher_ids"])
    count = scores.label_mask.sum()
    nats = -scores.log_probs.sum()
    total = divergence(batch["teacher_log_probs"][:, 1:][scores.label_mask], scores.of_words).sum()
    if nll_weight:
        total = total + nll_weight * nats
    total, _ = with_balancing(total, count, model, scores)
    return total, count, {"cross_entropy": (nats.detach(), count)}


def _bound(section: PreferenceSection) -> Objective:
    loss = functools.partial(_loss, section.nll_weight)
    return Objective(
        "distillation: the divergence from a teacher whose likeliest tokens are in the rows (arXiv 2306.13649)",
        loss, trained_tokens, RowLayout(teacher=1), loss,
        Keys(("nll_weight",), _bound, unread=("data.loss_on", "data.separator", "data.chat_template")),
        statistics=STATISTICS,
    )  # fmt: skip


DISTILLATION = _bound(PreferenceSection())
