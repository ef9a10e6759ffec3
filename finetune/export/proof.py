"""Checks that a merged model equals the trained one, by comparing logits against a derived bound.

A 16-bit merged weight is W + s·BA rounded once, with relative error u = 2^-9 (bfloat16) or 2^-12 (float16). Independent
rounding errors add up like a random walk, so after L layers of two blocks each the relative error of a hidden state
grows like u·sqrt(2L) (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). The factor `SAFETY` allows for
the several matrix products in a layer. A format that rounds more declares its `roundoff`. The measure is the root mean
square of the difference of the centred logits, relative to that of the centred logits themselves; they are centred
because softmax ignores a constant shift.

Rounding may explain more than a gentle adapter changes, and then the bare base would lie within the bound as well. So
the change itself must be there: with d the adapter's change of the logits and m that of the export, both from the base,
<m, d> / <d, d> is 1 for an exact export and 0 for the base. Rounding errors do not point along d, so at least `KEPT` is
left unless rounding swallowed the adapter.

A mixture of experts is not a continuous function: if two experts are nearly tied, rounding decides between them, and
the logits of that token can differ by any amount. For a mixture, both measures are therefore taken at the median token.
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
KEPT = 0.5


@dataclass(frozen=True)
class Proof:
    """The comparison of exported with trained logits on `rows` held-out rows with `tokens` tokens in total.

    `error` and `bound` are relative (see the module); `effect` is how much the adapter changed the base's logits, in
    the same measure, and `kept` the share of that change which the export has (1 where there is none); `agreement` is
    the share of positions with the same most likely next token. `median`: whether the measures are taken at the median
    token.
    """

    rows: int
    tokens: int
    error: float
    bound: float
    effect: float
    kept: float
    agreement: float
    median: bool = False

    @property
    def holds(self) -> bool:
        """Whether the error is within rounding, and the adapter's change in the export."""
        return self.error <= self.bound and self.kept >= KEPT


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
    distance, kept = (_median_distance, _median_kept) if mixture else (_distance, _kept)
    return Proof(
        rows=len(adapted),
        tokens=sum(len(row) for row in adapted),
        error=distance(merged, adapted),
        bound=bound,
        effect=distance(base, adapted),
        kept=kept(merged, adapted, base),
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


def _kept(merged: list[torch.Tensor], adapted: list[torch.Tensor], base: list[torch.Tensor]) -> float:
    along = size = 0.0
    for m, a, b in zip(merged, adapted, base, strict=True):
        change = (a - b).double()
        along += float(((m - b).double() * change).sum())
        size += float(change.square().sum())
    return along / size if size else 1.0


def _median_kept(merged: list[torch.Tensor], adapted: list[torch.Tensor], base: list[torch.Tensor]) -> float:
    m, a, b = (torch.cat(each).double() for each in (merged, adapted, base))  # (tokens, vocabulary)
    size = (a - b).square().sum(dim=-1)
    changed = size > 0
    along = ((m - b) * (a - b)).sum(dim=-1)
    return float((along[changed] / size[changed]).median()) if changed.any() else 1.0


def _agreement(these: list[torch.Tensor], those: list[torch.Tensor]) -> float:
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(these, those, strict=True))
    return same / sum(len(b) for b in those)
