"""Classification: a head scores each class of a row, in place of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.data.encoded import RowLayout
from finetune.data.labelled import LABEL, SEGMENT
from finetune.objectives.objective import Batch, Keys, Objective, Statistics, scored, scored_rows, with_balancing

if TYPE_CHECKING:
    from typing import Any

    import torch

STATISTICS = ("accuracy",)


def _loss(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Statistics]:
    """The summed cross-entropy of each row's class, in nats, the number of rows, and the sum of STATISTICS."""
    from torch.nn.functional import cross_entropy

    scores, label = scored(model, batch), batch[LABEL].long()
    kept = scored_rows(batch, 1)
    count = kept.sum()
    losses = cross_entropy(scores.logits, label, reduction="none").where(kept, 0)
    total, _ = with_balancing(losses.sum(), count, model, scores)
    right = (scores.logits.argmax(1) == label) & kept
    return total, count, {"accuracy": (right.sum().float(), count)}


CLASSIFICATION = Objective(
    "classifier: a head that scores the classes of a row by its last token, with cross-entropy",
    _loss, lambda batch: scored_rows(batch, 1).sum(), RowLayout((SEGMENT,), (LABEL,), scored=True), _loss,
    Keys(unread=("data.separator",)), statistics=STATISTICS, rate=0.5,
)  # fmt: skip
