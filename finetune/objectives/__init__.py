"""Training objectives. A new one is a function and its entry in OBJECTIVES, or is given from Python.

An objective is `loss(model, batch) -> (sum, count)`. Both add up over micro-batches, ranks and the halves of a
micro-batch that did not fit, so the gradient of sum / count does not depend on how a step was split (but for that of
`aux_loss`, taken over each micro-batch). `count(batch)` is the same count without the model: a step divides by it
before its first backward pass. The unit is the objective's own: trained tokens, or rows.

A batch has sequences, one for each segment of each row. `model(**batch, fused_lm_head=True)` returns, without
materialising all logits (`objectives.log_probs`):

    log_probs   (sequences, tokens - 1), float32: of each label given the tokens before it; 0 where not trained
    label_mask  (sequences, tokens - 1), bool: which tokens are trained
    aux_loss    (), or None: the load-balancing loss of a mixture of experts

If the objective has a `layout` of named segments or values, the batch also has `row` (sequences,), the row of each
sequence, and each value (rows,); such an objective calls `scored(model, batch)`, which is the same for padded and
packed rows. A row without trained tokens, which a rank gets that has fewer micro-batches than others, adds nothing to
either sum. A second segment `mismatched` is not among the sequences: it is for the objective's `step_mean`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune.config import Config
from finetune.config.field_types import name_of
from finetune.data.encoded import ONE_SEQUENCE, RowLayout
from finetune.objectives import classification, distillation, kto, preference, rewards
from finetune.objectives.objective import (
    MODEL_INPUTS,
    Batch,
    Loss,
    Objective,
    Statistics,
    by_sequence,
    cross_entropy,
    scored,
    sums,
    trained_rows,
    trained_tokens,
    with_balancing,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "MODEL_INPUTS", "OBJECTIVES", "Batch", "Loss", "Objective", "Statistics", "by_sequence", "cross_entropy", "given",
    "layout_of", "of", "scored", "sums", "supervised", "trained_rows", "trained_tokens", "with_balancing",
]  # fmt: skip


def supervised(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy, in nats, of each trained token given the tokens before it."""
    # -> `forward` in fused_head.py, installed by model_setup.complete
    scores = model(**batch, fused_lm_head=True)
    return with_balancing(-scores.log_probs.sum(), scores.label_mask.sum(), model, scores)


OBJECTIVES: dict[str, Objective] = {
    "supervised": Objective("next-token cross-entropy of the trained tokens", supervised, trained_tokens),
    **preference.FAMILY,
    "kto": kto.KTO,
    "reward": rewards.REWARD,
    "classification": classification.CLASSIFICATION,
    "distillation": distillation.DISTILLATION,
}


def of(config: Config) -> Objective:
    """The objective of a job, with the numbers of its section and the layout of its batches.

    Where the log-probabilities of the starting model are cached, they are values of the rows: `reference_chosen` for
    the segment `chosen`.
    """
    objective = OBJECTIVES[config.training.objective].bound(config.preference)
    if objective.layout.teacher:
        layout = replace(objective.layout, teacher=config.data.teacher_tokens)
        return replace(objective, layout=layout)
    if not (objective.reference and config.caches_reference):
        return objective
    columns = tuple(map(preference.reference_column, objective.layout.segments))
    return replace(objective, layout=replace(objective.layout, values=(*objective.layout.values, *columns)))


def layout_of(config: Config) -> RowLayout:
    """The layout of a job's batches; of an objective that another process was given, that of supervised rows."""
    return of(config).layout if config.training.objective in OBJECTIVES else ONE_SEQUENCE


def given(objective: Loss | Objective) -> str:
    """Add an objective from Python; its name for `training.objective`. A loss alone counts the trained tokens."""
    if not isinstance(objective, Objective):
        objective = Objective(objective.__doc__ or "given from Python", objective)
    name = name_of(objective.loss)
    OBJECTIVES[name] = objective
    return name
