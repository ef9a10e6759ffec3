"""Proves that rows of one packed row do not influence each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from finetune.errors import MachineError, first_line
from finetune.model import probes
from finetune.model.attention.packing import REMEDY

# Allowed relative change of a row's logits when other rows are packed with it. In the models tested, 16-bit rounding
# stays below 1%; a row that sees a neighbour changes by a third or more.
_STRAYS = 0.1
# Allowed change of the logits when the tokens of the previous row change, relative to the change if both were one row.
# It is zero except for rounding in a mixture of experts; a convolution over a few tokens causes little more.
_LEAKS = 0.01


def prove(model: Any) -> None:
    """Check on `model` itself that a packed row's logits do not depend on the row before it.

    Runs five short forward passes under the autocast of a step. Raises MachineError for a model that mixes packed rows
    or does not support them.
    """
    first, other, row = (each[0] for each in probes.rows(3, probes.TOKENS, model))

    def refusal(error: Exception) -> MachineError:
        return MachineError(f"`data.packing`: this model cannot take packed rows ({first_line(error)}); {REMEDY}")

    with probes.attempt(refusal):
        alone = _last_logits(model, [row])
        after, joined = (
            [_last_logits(model, rows(before))[-len(row) :] for before in (first, other)]
            for rows in (lambda before: [before, row], lambda before: [torch.cat([before, row])])
        )
    strayed = max(float((each - alone).norm() / alone.norm().clamp(min=1e-30)) for each in after)
    moved, mixed = (float((one - two).norm()) for one, two in (after, joined))
    # Non-finite logits are reported by `causality.prove`.
    if math.isfinite(strayed) and not (strayed <= _STRAYS and moved <= _LEAKS * mixed):
        raise MachineError(
            f"`data.packing`: packed rows influence each other in this model (by {strayed:.1%}); {REMEDY}"
        )


def _last_logits(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Centred logits (tokens, vocabulary) of the last of the packed `rows`."""
    lengths, device = [len(row) for row in rows], model.device
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    number = torch.arange(len(rows), dtype=torch.int32, device=device)  # row index
    return probes.logits(
        model,
        input_ids=torch.cat(list(rows))[None],
        position_ids=torch.cat([torch.arange(length, device=device) for length in lengths])[None],
        cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=max(lengths), max_length_k=max(lengths),
        seq_idx=number.repeat_interleave(starts.diff())[None],
    )[0, -lengths[-1] :]  # fmt: skip
