"""Checks that an objective given from Python keeps the contract of objectives: sums and counts that add up over rows.

A mean instead of a sum, or a count that is not the one that a step divides by, trains with a wrong gradient and no
error.
"""

from __future__ import annotations

from typing import Any

import torch

from finetune.config.field_types import GIVEN
from finetune.errors import ConfigError
from finetune.model import probes
from finetune.model.base import autocast
from finetune.model.distributed.placement import release_gathered
from finetune.objectives import OBJECTIVES, Batch, Objective

# Allowed relative difference between the loss of two rows and the sum of theirs: rounding in 16 bit, and the
# load-balancing loss of a mixture of experts. A mean instead of a sum is off by a half or more.
_TOLERANCE = 0.1


def prove(name: str, model: Any, precision: str) -> None:
    """Run an objective given from Python on two short rows, together and one by one; others have their tests.

    `model` must have the head of `objectives.log_probs`. Raises ConfigError naming what does not add up, and whatever
    the objective itself raises.
    """
    if not name.startswith(GIVEN):
        return
    objective, rows = OBJECTIVES[name], torch.cat(probes.rows(2, probes.TOKENS, model))
    labels = rows.clone()
    labels[0, : probes.TOKENS // 2] = -100  # so that the rows have different counts
    batches = [{"input_ids": rows[part], "labels": labels[part]} for part in (slice(2), slice(1), slice(1, 2))]
    was_training = model.training
    model.eval()
    try:
        with autocast(precision, model.device):
            together, *alone = [_read(name, objective, model, batch) for batch in batches]
    finally:
        model.train(was_training)
        release_gathered(model)
    for what, whole, parts in zip(("loss", "count"), together, zip(*alone, strict=True), strict=True):
        if abs(whole - sum(parts)) > _TOLERANCE * abs(sum(parts)):
            raise ConfigError(
                f"`training.objective`: `{name}` gives two rows together a {what} of {whole:.4g}, and one by one "
                f"{parts[0]:.4g} and {parts[1]:.4g}: return sums over the rows, not means"
            )


def _read(name: str, objective: Objective, model: Any, batch: Batch) -> tuple[float, float]:
    """Loss and count of a batch."""
    found = objective.loss(model, {**batch})
    if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(one, torch.Tensor) for one in found)):
        raise ConfigError(f"`training.objective`: `{name}` must return two tensors, the summed loss and its count")
    total, count = found
    if total.dim() or not total.requires_grad:
        raise ConfigError(
            f"`training.objective`: `{name}` must return one number with a gradient as its loss, not one of shape "
            f"{tuple(total.shape)} with {'a' if total.requires_grad else 'no'} gradient"
        )
    divisor = int(objective.count(batch))
    if int(count) != divisor:
        raise ConfigError(
            f"`training.objective`: `{name}` returns a count of {int(count)} for a batch whose loss would be "
            f"divided by {divisor}; give the count of a batch as well: Objective(help, loss, count)"
        )
    return float(total.detach()), float(count)
