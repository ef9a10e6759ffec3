"""Checks that an objective has the rows it needs, and that one given from Python has sums that add up over rows.

A mean instead of a sum, or a count that is not the one that a step divides by, trains with a wrong gradient and no
error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from finetune.config.field_types import GIVEN
from finetune.data.encoded import IGNORE, ONE_SEQUENCE, RowLayout
from finetune.errors import ConfigError
from finetune.model import probes
from finetune.model.precision import autocast
from finetune.objectives import OBJECTIVES, Batch, Objective

# Allowed relative difference between the loss of two rows and the sum of theirs: rounding in 16 bit, and the
# load-balancing loss of a mixture of experts. A mean instead of a sum is off by a half or more.
_TOLERANCE = 0.1


def check_rows(name: str, rows: RowLayout, context: int) -> None:
    """Raise ConfigError if rows lack what the objective `name` trains on, or are split over ranks but must be whole for
    it.
    """
    wanted = OBJECTIVES[name].layout
    needed = tuple(value for value in rows.values if value not in wanted.optional)
    if replace(rows, values=needed) != wanted:
        raise ConfigError(
            f"`training.objective`: `{name}` trains {wanted}, and `data.format` made {rows}; set one to match the other"
        )
    if context > 1 and wanted != ONE_SEQUENCE:
        raise ConfigError(
            f"`distributed.context`: `{name}` needs sums over whole rows, and a rank has only a slice of each; set 1"
        )


def prove(name: str, model: Any, precision: str) -> None:
    """Run an objective given from Python on two short rows, together and one by one; others have their tests.

    Rows have as many segments as the objective's layout names; values are 1.

    `model` must have the head of `objectives.log_probs`. Raises ConfigError naming what does not add up, and whatever
    the objective itself raises.
    """
    if not name.startswith(GIVEN):
        return
    objective = OBJECTIVES[name]
    segments = objective.layout.together
    ids = torch.cat(probes.rows(2 * segments, probes.TOKENS, model))  # (sequences, tokens)
    labels = ids.clone()
    labels[:segments, : probes.TOKENS // 2] = IGNORE  # so that the rows have different counts
    batches = [_batch(objective.layout, ids, labels, rows) for rows in (range(2), range(1), range(1, 2))]
    with probes.evaluating(model), autocast(precision, model.device):
        together, *alone = [_read(name, objective, model, batch) for batch in batches]
    for what, whole, parts in zip(("loss", "count"), together, zip(*alone, strict=True), strict=True):
        if abs(whole - sum(parts)) > _TOLERANCE * abs(sum(parts)):
            raise ConfigError(
                f"`training.objective`: `{name}` gives two rows together a {what} of {whole:.4g}, and one by one "
                f"{parts[0]:.4g} and {parts[1]:.4g}: return sums over the rows, not means"
            )


def _batch(layout: RowLayout, ids: torch.Tensor, labels: torch.Tensor, rows: range) -> Batch:
    """Some of the rows, as the collator makes them."""
    part = slice(rows.start * layout.together, rows.stop * layout.together)
    batch = {"input_ids": ids[part], "labels": labels[part]}
    if layout == ONE_SEQUENCE:
        return batch
    number = torch.arange(len(rows), device=ids.device).repeat_interleave(layout.together)
    mean = {"step_mean": torch.zeros((), dtype=torch.float64, device=ids.device)} if layout.apart else {}
    values = {name: torch.ones(len(rows), device=ids.device) for name in layout.values}
    return {**batch, "row": number, **values, **mean}


def _read(name: str, objective: Objective, model: Any, batch: Batch) -> tuple[float, float]:
    output = objective.loss(model, {**batch})
    if not (isinstance(output, tuple) and len(output) == 2 and all(isinstance(one, torch.Tensor) for one in output)):
        raise ConfigError(f"`training.objective`: `{name}` must return two tensors, the summed loss and its count")
    total, count = output
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
