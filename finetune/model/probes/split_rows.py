"""Checks that a row split over ranks has the log-probabilities of the whole row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from finetune.errors import ConfigError, first_line
from finetune.model import probes
from finetune.model.distributed.context import REMEDY, split

# Allowed relative change of a row's log-probabilities by slicing: rounding in 16 bit.
_STRAYS = 0.1


@torch.no_grad()
def prove(model: Any, group: ProcessGroup | None) -> None:
    """Check on `model` itself that the slices of a row have the log-probabilities of the whole row.

    Runs two short forward passes under the autocast of a step; every rank of `group` must call it. Raises ConfigError
    for a model whose rows cannot be split.
    """
    if group is None:
        return
    size = group.size()
    tokens = -(-probes.TOKENS // size) * size
    [row] = probes.rows(1, tokens, model)
    positions = torch.arange(tokens, device=row.device)[None]

    def refusal(error: Exception) -> ConfigError:
        return ConfigError(
            f"`distributed.context`: the rows of this model cannot be split ({first_line(error)}); {REMEDY}"
        )

    with probes.evaluating(model), probes.attempt(refusal):
        whole = _log_probs(model, row, positions)
        with split(model, group):
            mine = _log_probs(model, row, positions)
    slices = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(slices, mine.contiguous(), group=group)
    strayed = float((torch.cat(slices, dim=1)[:, :-1] - whole).norm() / (whole - whole.mean()).norm().clamp(min=1e-30))
    if strayed > _STRAYS:
        raise ConfigError(
            f"`distributed.context`: the log-probabilities of a row change by {strayed:.1%} when it is split, so this "
            f"model mixes tokens outside of attention; {REMEDY}"
        )


def _log_probs(model: Any, row: Tensor, positions: Tensor) -> Tensor:
    return model(input_ids=row, labels=row, position_ids=positions, fused_lm_head=True).log_probs
