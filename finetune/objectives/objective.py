"""Defines an objective and the sums that objectives are made of; the table is in `finetune.objectives`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from finetune.config import PreferenceSection
from finetune.data.encoded import ONE_SEQUENCE, RowLayout

if TYPE_CHECKING:
    import torch

Batch = dict[str, Any]
"""The model's keyword arguments: tensors of `input_ids` and `labels` (sequences, tokens), and what packing adds; the
`row` of each sequence and the values of rows, if the objective's layout names any.
"""

MODEL_INPUTS = frozenset({
    "input_ids", "labels", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "seq_idx", "key_parts", "pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes",
    "image_position_ids", "mm_token_type_ids", "token_type_ids",
})  # fmt: skip
"""The entries of a batch that are the model's."""


Loss: TypeAlias = "Callable[[Any, Batch], Any]"
"""Returns (sum, count), or (sum, count, statistics)."""

Statistics: TypeAlias = "dict[str, tuple[torch.Tensor, torch.Tensor]]"
"""Sums over the rows of a batch that metrics.jsonl has the means of, each with its count."""

SETTINGS = tuple(PreferenceSection.model_fields)
"""The keys of the section `preference`."""


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Number of trained tokens: labels other than -100, except the first of each row (see `encoded.IGNORE`)."""
    return (batch["labels"][:, 1:] != -100).sum()


def cross_entropy(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy, in nats, and number of the trained tokens, float64."""
    scores = scored(model, batch)
    return -scores.log_probs.double().sum(), scores.label_mask.double().sum()


def scored(model: Any, batch: Batch, **more: torch.Tensor) -> Any:
    """The model's output for a batch, which may hold other values too; `more` inputs are its head's."""
    inputs = {name: value for name, value in batch.items() if name in MODEL_INPUTS}
    return model(**inputs, **more, fused_lm_head=True)


@dataclass(frozen=True)
class Keys:
    """The keys of the config that an objective has: `read` of the section `preference`, by `bind`, which returns the
    objective with their values; and `unread`, those of other sections that change nothing.
    """

    read: tuple[str, ...] = ()
    bind: Callable[[PreferenceSection], Objective] | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Objective:
    """A loss function returning a sum with its graph and its count, both on the device; and the count alone.

    `layout`: the segments and values of the rows that it trains on. `evaluated`: what an evaluation sums, by default
    the cross-entropy of trained tokens. `reference`: it needs the log-probabilities of the starting model.
    `statistics`: the names of those that the loss returns besides, in order.
    `step_mean`: the sum and count of what the loss needs the mean of over all rows of a step. It is computed from the
    segments `mismatched`, which the loss does not see, without gradients and before the first pass, so that no split of
    the step changes it; the loss finds the mean in its batch as `step_mean`, (), float64.
    `rate`: its usual learning rate over that of supervised training.
    """

    help: str
    loss: Loss
    count: Callable[[Batch], torch.Tensor] = trained_tokens
    layout: RowLayout = ONE_SEQUENCE
    evaluated: Loss = cross_entropy
    keys: Keys = Keys()
    reference: bool = False
    statistics: tuple[str, ...] = ()
    step_mean: Loss | None = None
    rate: float = 1.0

    def bound(self, section: PreferenceSection) -> Objective:
        """This objective with the values of the keys that it reads."""
        return self.keys.bind(section) if self.keys.bind else self

    @property
    def ignores(self) -> tuple[str, ...]:
        """The keys of the config that change nothing here."""
        ignored = tuple(f"preference.{key}" for key in SETTINGS if key not in self.keys.read)
        noise = ("neftune_noise_alpha",) if self.keys.read or self.layout.scored else ()
        scores = ("memory.loss_tokens",) if self.layout.scored else ()
        return (*ignored, *noise, *scores, *self.keys.unread)


def sums(loss: Loss, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and the count of `loss` over a batch, float64, on the device, without the load-balancing loss of a
    mixture.

    That is no property of the rows: it is taken over whole micro-batches, so it depends on how they are batched.
    """
    from finetune.model.structure import experts

    with experts.without_balancing(model):
        total, count, *_ = loss(model, batch)
    return total.double(), count.double()


def by_sequence(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sums (sequences,) of `values` (sequences, tokens - 1), which begin with the second token.

    Packed sequences are summed one by one in float64, in a fixed order and without waiting for the device.
    """
    if "cu_seq_lens_q" not in batch:
        return values.sum(1)
    import torch

    starts = (batch["cu_seq_lens_q"] - 1).clamp(min=0)
    sums: torch.Tensor = torch.segment_reduce(values[0].double(), "sum", offsets=starts)
    return sums.to(values.dtype if values.is_floating_point() else torch.int64)


def trained_rows(batch: Batch, segments: int) -> torch.Tensor:
    """Which rows (rows,) have trained tokens in each of their `segments`; the others have no loss."""
    return (by_sequence(batch["labels"][:, 1:] != -100, batch).view(-1, segments) > 0).all(1)


def scored_rows(batch: Batch, segments: int) -> torch.Tensor:
    """Which rows (rows,) a head scores: all with labels in each of their `segments`, be it on the first token alone."""
    import torch

    labelled = batch["labels"] != -100
    if "cu_seq_lens_q" in batch:
        labelled = torch.segment_reduce(labelled[0].double(), "max", offsets=batch["cu_seq_lens_q"]) > 0
    else:
        labelled = labelled.any(1)
    return labelled.view(-1, segments).all(1)


def with_balancing(
    total: torch.Tensor, count: torch.Tensor, model: Any, scores: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A summed loss and its token count, with a mixture of experts' load-balancing loss added per token.

    It is weighted by the coefficient in the model's own config (arXiv 2101.03961, section 2.2). `scores` is what the
    model returned, with or without its fused head.
    """
    if getattr(scores, "aux_loss", None) is not None:
        config = getattr(model, "module", model).config.get_text_config()
        total = total + config.router_aux_loss_coef * scores.aux_loss * count
    return total, count
