"""Kahneman-Tversky optimization (KTO): single answers, each labelled desirable or not (arXiv 2402.01306).

R is how much likelier an answer is than under the reference, as in `preference`. The loss of an answer depends on how
far R is above or below z, the divergence of the model from the reference, which is estimated by the mean R of answers
to other prompts: the segments `mismatched` of the rows. The estimate has no gradient, and is made once for all rows of
a step; TRL 1.16 makes one for each micro-batch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from finetune.config import PreferenceSection
from finetune.data.encoded import ANSWER, DESIRABLE, MISMATCHED, RowLayout
from finetune.objectives.objective import Batch, Keys, Objective, Statistics, trained_rows, with_balancing
from finetune.objectives.preference import Numbers, score_answers

if TYPE_CHECKING:
    from torch import Tensor

LABELLED = RowLayout((ANSWER, MISMATCHED), (DESIRABLE,))

STATISTICS = ("rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected", "kl")
"""What is recorded: of desirable answers as `chosen`, of the others as `rejected`; `kl` is z."""

_DEFAULTS = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def loss_of_answers(ratio: Tensor, desirable: Tensor, kl: Tensor, numbers: Numbers) -> Tensor:
    """The loss of each answer (answers,) from its R, whether it is desirable, and z, ().

    Section 4 of arXiv 2402.01306.
    """
    import torch

    gain = numbers.beta * torch.where(desirable, ratio - kl, kl - ratio)
    return torch.where(desirable, numbers.desirable_weight, numbers.undesirable_weight) * torch.sigmoid(-gain)


def _loss(numbers: Numbers, model: Any, batch: Batch) -> tuple[Tensor, Tensor, Statistics]:
    """The summed loss of the answers in a batch, their number, and the sums of STATISTICS."""
    import torch

    [answer], scores = score_answers(model, batch, (ANSWER,), reference=True)
    kept, desirable = trained_rows(batch, 1), batch[DESIRABLE] > 0
    kl = batch["step_mean"].float().clamp(min=0)
    loss = loss_of_answers(answer.ratio, desirable, kl, numbers)
    count = kept.sum()
    total, _ = with_balancing(torch.where(kept, loss, 0).sum(), count, model, scores)
    with torch.no_grad():
        reward, log_prob, sides = numbers.beta * answer.ratio, answer.log_prob, (kept & desirable, kept & ~desirable)
        sums = [(torch.where(side, each, 0).sum(), side.sum()) for each in (reward, log_prob) for side in sides]
    return total, count, dict(zip(STATISTICS, (*sums, (kl * count, count)), strict=True))


def _divergence(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of R over mismatched answers, and their number."""
    import torch

    [answer], _ = score_answers(model, batch, (MISMATCHED,), reference=True)
    kept = trained_rows(batch, 1)
    return torch.where(kept, answer.ratio, 0).sum(), kept.sum()


def _bound(section: PreferenceSection) -> Objective:
    loss = functools.partial(_loss, Numbers.of(section, _DEFAULTS))
    return Objective(
        "Kahneman-Tversky optimization of answers that are each labelled desirable or not (arXiv 2402.01306)",
        loss, lambda batch: trained_rows(batch, 1).sum(), LABELLED, loss,
        Keys((*_DEFAULTS, "reference"), _bound), reference=True, statistics=STATISTICS, step_mean=_divergence,
        rate=0.025,
    )  # fmt: skip


KTO = _bound(PreferenceSection())
