"""Checks that a merged model equals the trained one, by comparing logits against a derived bound.

A 16-bit merged weight is W + s·BA rounded once, with relative error u = 2^-9 (bfloat16) or 2^-12 (float16). Independent
rounding errors add up like a random walk, so after L layers of two blocks each the relative error of a hidden state
grows like u·sqrt(2L) (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). The factor `SAFETY` allows for
the several matrix products in a layer. A format that rounds more declares its `roundoff`. The measure is the root mean
square of the difference of the centred logits, relative to that of the centred logits themselves; they are centred
because softmax ignores a constant shift.

A mixture of experts is not a continuous function: if two experts are nearly tied, rounding decides between them, and
the logits of that token can differ by any amount. For a mixture, the measure is therefore taken at the median token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from finetune.runtime import libraries

# Half a unit in the last place, relative.
ROUNDOFF = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}
SAFETY = 4.0


@dataclass(frozen=True)
class Proof:
    """The comparison of exported with trained logits on `rows` held-out rows with `tokens` tokens in total.

    `error` and `bound` are relative (see the module); `effect` is how much the adapter changed the base's logits, in
    the same measure; `agreement` is the share of positions with the same most likely next token. `median`: whether the
    measure is taken at the median token.
    """

    rows: int
    tokens: int
    error: float
    bound: float
    effect: float
    agreement: float
    median: bool = False

    @property
    def holds(self) -> bool:
        """Whether the error is within rounding and, if the effect exceeds the bound, smaller than the effect."""
        return self.error <= self.bound and (self.error < self.effect or self.effect <= self.bound)


def bound(layers: int, roundoff: float) -> float:
    """The relative logit error explained by a relative error of `roundoff` in each merged weight."""
    return SAFETY * roundoff * math.sqrt(2 * layers)


@torch.inference_mode()
def logits(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each row of token ids, centred over the vocabulary, float32 on the CPU, (tokens, vocabulary)."""
    model.eval()
    found = []
    for row in rows:
        with libraries.without_cudnn_attention():
            output = model(input_ids=torch.tensor([row], device=model.device)).logits[0].float().cpu()
        found.append(output - output.mean(dim=-1, keepdim=True))
    return found


def compare(
    merged: list[torch.Tensor],
    adapted: list[torch.Tensor],
    base: list[torch.Tensor],
    bound: float,
    *,
    mixture: bool = False,
) -> Proof:
    """Compare the three models' centred logits on the same rows; `mixture`: whether the models have experts."""
    distance = _median_distance if mixture else _distance
    return Proof(
        rows=len(adapted),
        tokens=sum(len(row) for row in adapted),
        error=distance(merged, adapted),
        bound=bound,
        effect=distance(base, adapted),
        agreement=_agreement(merged, adapted),
        median=mixture,
    )


def _distance(these: list[torch.Tensor], those: list[torch.Tensor]) -> float:
    difference = sum(float((a - b).double().square().sum()) for a, b in zip(these, those, strict=True))
    size = sum(float(b.double().square().sum()) for b in those)
    # A NaN anywhere makes the quotient NaN, which fails every comparison with a bound.
    return math.sqrt(difference / size) if difference == difference else math.nan


def _median_distance(these: list[torch.Tensor], those: list[torch.Tensor]) -> float:
    a, b = torch.cat(these).double(), torch.cat(those).double()  # (tokens, vocabulary)
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())  # NaN where there is one


def _agreement(these: list[torch.Tensor], those: list[torch.Tensor]) -> float:
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(these, those, strict=True))
    return same / sum(len(b) for b in those)
