"""Proves that rows of one packed row do not influence each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from finetune.errors import MachineError, first_line
from finetune.model import probes
from finetune.model.attention import packing
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


def prove_shared(model: Any) -> str | None:
    """Compare the logits of an answer that shares its prompt with another one and those after a prompt of its own.

    Runs two short forward passes under the autocast of a step. Returns one line if they fail or differ beyond rounding.
    """
    prompt, other, answer = (each[0] for each in probes.rows(3, probes.TOKENS, model))
    first, tokens = torch.cat([prompt, other]), len(prompt) - 1
    why = None
    try:
        with probes.attempt():
            own = _last_logits(model, [first, torch.cat([prompt, answer])])[tokens:]
            shared = _last_logits(model, [first, torch.cat([prompt[-1:], answer])], [0, tokens])
        strayed = float((shared - own).norm() / own.norm().clamp(min=1e-30))
        if strayed > _STRAYS:
            why = f"its logits then differ by {strayed:.1%}"
    except probes.Failed as failed:
        why = f"that fails ({failed})"
    return why and f"a prompt is computed once for each answer, not for both: in this model {why}"


def _last_logits(model: Any, rows: Sequence[torch.Tensor], shared: Sequence[int] = ()) -> torch.Tensor:
    """Centred logits (tokens, vocabulary) of the last of the packed `rows`; see `packing.places`."""
    places = packing.places([len(row) for row in rows], shared, model.device)
    return probes.logits(model, input_ids=torch.cat(list(rows))[None], **places)[0, -len(rows[-1]) :]
