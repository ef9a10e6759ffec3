"""Reward models: a scalar head scores the chosen and the rejected answer of a row (Bradley-Terry)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune.config import PreferenceSection
from finetune.data.encoded import RowLayout
from finetune.objectives.objective import Batch, Keys, Objective, Statistics, scored, scored_rows, with_balancing
from finetune.objectives.preference import PAIRS

if TYPE_CHECKING:
    import torch

STATISTICS = ("rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies")
MARGIN = "margin"


def loss_of_pairs(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | float, centering: float
) -> torch.Tensor:
    """-log sigmoid of how far the chosen reward is above the rejected one and `margin` (arXiv 2307.09288, equation 2),
    and `centering` times the square of their sum (arXiv 2312.09244).
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected) ** 2


def _loss(centering: float, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Statistics]:
    scores = scored(model, batch)
    chosen, rejected = scores.logits.view(-1, 2).unbind(1)
    kept = scored_rows(batch, 2)
    count = kept.sum()
    loss = loss_of_pairs(chosen, rejected, batch.get(MARGIN, 0.0), centering)
    of_pairs = (chosen, rejected, chosen - rejected, (chosen > rejected).float())
    sums = [values.detach().where(kept, 0).sum() for values in of_pairs]
    statistics = {name: (value, count) for name, value in zip(STATISTICS, sums, strict=True)}
    total, _ = with_balancing(loss.where(kept, 0).sum(), count, model, scores)
    return total, count, statistics


def _bound(section: PreferenceSection) -> Objective:
    loss = functools.partial(_loss, section.reward_centering)
    return Objective(
        "reward model: a scalar head that scores the chosen answer above the rejected one by the row's `margin`, if it "
        "has one (Bradley-Terry, arXiv 2203.02155)",
        loss, lambda batch: scored_rows(batch, 2).sum(), replace(PAIRS, optional=(MARGIN,), scored=True), loss,
        Keys(("reward_centering",), _bound), statistics=STATISTICS, rate=0.5,
    )  # fmt: skip


REWARD = _bound(PreferenceSection())


def _rewards(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = scored(model, batch).logits[:, 0]
    return rewards.sum(), rewards.new_tensor(len(rewards))


ANSWERS = Objective(
    "the mean reward of single answers; for an evaluation", _rewards, layout=RowLayout(scored=True), evaluated=_rewards
)
