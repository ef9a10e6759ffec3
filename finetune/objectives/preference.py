"""Training on preferences between answers: direct preference optimization (DPO) and its family.

A row of `chosen` and `rejected` has one loss, made of L, the summed log-probability of an answer's trained tokens (its
end of turn included), of n, their number, and of R = L - L', where L' is that under the reference: the starting model.
Losses are averaged over pairs, so that they depend neither on the micro-batch nor on the other pairs in it.

A member of the family is a function from both answers to the loss of each pair, and its entry in FAMILY.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config import PreferenceSection
from finetune.data.encoded import RowLayout
from finetune.objectives.objective import (
    Batch,
    Keys,
    Objective,
    Statistics,
    by_sequence,
    scored,
    trained_rows,
    with_balancing,
)

if TYPE_CHECKING:
    from torch import Tensor

PAIRS = RowLayout(("chosen", "rejected"))

STATISTICS = (
    "rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies", "logps_chosen", "logps_rejected",
)  # fmt: skip
"""What is recorded of pairs: `reward` is what a method makes of an answer, `logps` is L."""


def reference_column(segment: str) -> str:
    """The value of a row that has the log-probability of a segment under the reference."""
    return f"reference_{segment}"


@dataclass(frozen=True)
class Numbers:
    """The numbers of the section `preference` that an objective reads, with its own defaults where they are null."""

    beta: float = 0.0
    label_smoothing: float = 0.0
    target_margin: float = 0.0
    nll_weight: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @classmethod
    def of(cls, section: PreferenceSection, defaults: Mapping[str, float]) -> Numbers:
        """The keys of `defaults`, which are taken where `section` has null."""
        given = {
            "beta": section.beta,
            "label_smoothing": section.label_smoothing,
            "target_margin": section.target_margin,
            "nll_weight": section.nll_weight,
            "desirable_weight": section.desirable_weight,
            "undesirable_weight": section.undesirable_weight,
        }
        values = {key: value for key in defaults if (value := given[key]) is not None}
        return cls(**{**defaults, **values})


@dataclass(frozen=True)
class AnswerScores:
    """Log-probabilities of one answer of each row: L, n and L' (rows,), float32; no L' without a reference."""

    log_prob: Tensor
    tokens: Tensor
    reference: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """L / n: the mean log-probability of a token."""
        return self.log_prob / self.tokens

    @property
    def ratio(self) -> Tensor:
        """R: the logarithm of how much likelier the answer is than under the reference."""
        assert self.reference is not None
        return self.log_prob - self.reference


PairLoss = Callable[[AnswerScores, AnswerScores, Numbers], "Tensor"]
Reward = Callable[[AnswerScores, Numbers], "Tensor"]


def _by_reference(answer: AnswerScores, numbers: Numbers) -> Tensor:
    """The implicit reward of DPO (arXiv 2305.18290, section 4)."""
    return numbers.beta * answer.ratio


def _by_mean(answer: AnswerScores, numbers: Numbers) -> Tensor:
    """The implicit reward without a reference (arXiv 2405.14734, section 2.2)."""
    return numbers.beta * answer.mean


def _dpo(chosen: AnswerScores, rejected: AnswerScores, numbers: Numbers) -> Tensor:
    """Equation 7 of arXiv 2305.18290; with label smoothing conservative DPO (section 3 of its authors' cdpo.pdf)."""
    from torch.nn.functional import logsigmoid

    h, flipped = numbers.beta * (chosen.ratio - rejected.ratio), numbers.label_smoothing
    return -(1 - flipped) * logsigmoid(h) - flipped * logsigmoid(-h)


def _robust(chosen: AnswerScores, rejected: AnswerScores, numbers: Numbers) -> Tensor:
    """Equation 12 of arXiv 2403.00409: unbiased where that share of pairs is labelled the wrong way round."""
    from torch.nn.functional import logsigmoid

    h, flipped = numbers.beta * (chosen.ratio - rejected.ratio), numbers.label_smoothing
    return (-(1 - flipped) * logsigmoid(h) + flipped * logsigmoid(-h)) / (1 - 2 * flipped)


def _ipo(chosen: AnswerScores, rejected: AnswerScores, numbers: Numbers) -> Tensor:
    """Equation 17 of arXiv 2310.12036, tau being `beta`, of means over tokens."""
    gap = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
    return (gap - 1 / (2 * numbers.beta)) ** 2


def _simpo(chosen: AnswerScores, rejected: AnswerScores, numbers: Numbers) -> Tensor:
    """Equation 6 of arXiv 2405.14734."""
    from torch.nn.functional import logsigmoid

    return -logsigmoid(numbers.beta * (chosen.mean - rejected.mean) - numbers.target_margin)


def _orpo(chosen: AnswerScores, rejected: AnswerScores, numbers: Numbers) -> Tensor:
    """Equations 6 and 7 of arXiv 2403.07691, the cross-entropy being that of the chosen answer alone."""
    from torch.nn.functional import logsigmoid

    return -chosen.mean - numbers.beta * logsigmoid(log_odds(chosen.mean) - log_odds(rejected.mean))


def log_odds(log_prob: Tensor) -> Tensor:
    """The logarithm of p / (1 - p), from that of p, which counts as -1e-6 at most.

    log(1 - p) has two forms, each exact on its side of p = 1/2 (M. Mächler, "Accurately computing log(1 - exp(-|a|))").
    """
    import torch

    log_prob = log_prob.clamp(max=-1e-6)  # clamped before `where`, since both branches get a gradient
    near_one = log_prob > -math.log(2)
    of_large = torch.log(-torch.expm1(torch.where(near_one, log_prob, -1.0)))
    of_small = torch.log1p(-torch.exp(torch.where(near_one, -1.0, log_prob)))
    return log_prob - torch.where(near_one, of_large, of_small)


def score_answers(
    model: Any, batch: Batch, segments: tuple[str, ...], *, reference: bool
) -> tuple[list[AnswerScores], Any]:
    """The answers in each of the `segments` of a batch, and what the model returned for it."""
    import torch

    from finetune.objectives.starting_model import reference_log_probs

    scores = scored(model, batch)
    columns = [by_sequence(scores.log_probs, batch), by_sequence(scores.label_mask, batch).clamp(min=1)]
    if reference:
        cached = [reference_column(segment) for segment in segments]
        if cached[0] in batch:
            columns.append(torch.stack([batch[name] for name in cached], 1))
        else:
            columns.append(reference_log_probs(model, batch))
    of_segments = (column.view(-1, len(segments)).unbind(1) for column in columns)
    return [AnswerScores(*values) for values in zip(*of_segments, strict=True)], scores


def _loss(
    losses: PairLoss, reward: Reward, reference: bool, numbers: Numbers, model: Any, batch: Batch
) -> tuple[Tensor, Tensor, Statistics]:
    """The summed loss of the pairs in a batch, their number, and the sums of STATISTICS."""
    import torch

    (chosen, rejected), scores = score_answers(model, batch, PAIRS.segments, reference=reference)
    kept = trained_rows(batch, 2)
    loss = losses(chosen, rejected, numbers)
    if numbers.nll_weight:
        loss = loss - numbers.nll_weight * chosen.mean
    count = kept.sum()
    total, _ = with_balancing(torch.where(kept, loss, 0).sum(), count, model, scores)
    with torch.no_grad():
        better, worse = reward(chosen, numbers), reward(rejected, numbers)
        of_pairs = (better, worse, better - worse, (better > worse).float(), chosen.log_prob, rejected.log_prob)
        sums = [torch.where(kept, values.detach(), 0).sum() for values in of_pairs]
    return total, count, {name: (value, count) for name, value in zip(STATISTICS, sums, strict=True)}


def _pairs(
    help: str, losses: PairLoss, reward: Reward, *, reference: bool = True, rate: float = 0.05, **defaults: float
) -> Objective:
    """The entry of a loss of pairs that reads the keys of `defaults`; a key that is null has its default."""

    read = (*defaults, *(("reference",) if reference else ()))

    def bind(section: PreferenceSection) -> Objective:
        loss = functools.partial(_loss, losses, reward, reference, Numbers.of(section, defaults))
        return Objective(
            help, loss, lambda batch: trained_rows(batch, 2).sum(), PAIRS, loss, Keys(read, bind), reference,
            STATISTICS, rate=rate,
        )  # fmt: skip

    return bind(PreferenceSection())


FAMILY: dict[str, Objective] = {
    "dpo": _pairs(
        "direct preference optimization (arXiv 2305.18290), with `preference.label_smoothing` conservative",
        _dpo, _by_reference, beta=0.1, label_smoothing=0.0, nll_weight=0.0,
    ),
    "robust_dpo": _pairs(
        "DPO without bias where a share of pairs, `preference.label_smoothing`, is labelled the wrong way round (arXiv "
        "2403.00409)",
        _robust, _by_reference, beta=0.1, label_smoothing=0.1, nll_weight=0.0,
    ),
    "ipo": _pairs(
        "identity preference optimization: a squared distance to a margin of 1 / (2 beta) (arXiv 2310.12036)",
        _ipo, _by_reference, beta=0.1, nll_weight=0.0,
    ),
    "simpo": _pairs(
        "mean log-probabilities with a target margin, without a reference (arXiv 2405.14734)",
        _simpo, _by_mean, reference=False, rate=0.025, beta=2.0, target_margin=1.0, nll_weight=0.0,
    ),
    "orpo": _pairs(
        "cross-entropy of the chosen answer and an odds ratio, without a reference (arXiv 2403.07691)",
        _orpo, _by_mean, reference=False, rate=0.25, beta=0.1,
    ),
}  # fmt: skip
