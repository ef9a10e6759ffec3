"""The loss on the evaluation set: nats per trained token over all rows, the same whatever the micro-batch.

transformers' own evaluation averages the means of batches, so that a short answer counts as much as a long one and
the result depends on the batch size. No logits are kept: TRL's fused head scores the tokens in tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from finetune.config import Config
from finetune.data.batching import MicroBatching
from finetune.errors import OutOfMemoryError
from finetune.measure.out_of_memory import is_out_of_memory, reason
from finetune.model.base import autocast
from finetune.model.causality import capability_of, needs_mask
from finetune.objectives import log_probs
from finetune.runtime import ranks
from finetune.runtime.libraries import without_cudnn_attention
from finetune.training import oom_retry
from finetune.training.batches import COLUMNS
from finetune.training.collator import Inputs, MicroBatches, for_model
from finetune.training.step import Step


class DoesNotFit(OutOfMemoryError):
    """A row that alone is more than the memory takes; `inputs` is its micro-batch."""

    def __init__(self, inputs: Inputs, reason: str) -> None:
        super().__init__(f"out of memory in an evaluation, at a row of {inputs['input_ids'].numel()} tokens: {reason}")
        self.inputs = inputs


@torch.no_grad()
def summed_loss(
    model: Any,
    steps: Iterable[list[Inputs]],
    limit: oom_retry.Limit | None = None,
    on_split: Callable[[Inputs], None] = lambda part: None,
    *,
    precision: str,
    masked: bool,
) -> torch.Tensor:
    """(sum of the trained tokens' losses in nats, their number) over `steps`, float64, on the model's device.

    A step is a list of micro-batches, as in training. Nothing but the two sums is kept of one. A micro-batch that does
    not fit is split: `limit` remembers its size, and `on_split` is called with it. `precision` is that of the step;
    with `masked` the model is given the padding mask.

    `model` must have the head of `objectives.log_probs`. Raises DoesNotFit where a row alone does not fit.
    """
    limit = limit or oom_retry.Limit()
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=model.device)
    try:
        for batch in itertools.chain.from_iterable(steps):
            parts = limit.parts([batch])
            while parts:
                try:
                    sums += _sums(model, for_model(parts[0], masked=masked), precision)
                    del parts[0]
                    continue
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if not limit.lower(parts[0]):
                        raise DoesNotFit(parts[0], reason(error)) from None
                oom_retry.release()
                on_split(parts[0])
                parts = limit.parts(parts)
    finally:
        model.train(was_training)
    return sums


def _sums(model: Any, batch: Inputs, precision: str) -> torch.Tensor:
    with autocast(precision, model.device):
        outputs = model(**send_to_device(batch, model.device), fused_lm_head=True)
    return torch.stack([-outputs.log_probs.double().sum(), outputs.label_mask.double().sum()])


def loader(rows: Any, collate: MicroBatches, batch_size: int) -> Iterable[list[Inputs]]:
    """The rows of an evaluation in their order, as steps are made of training rows."""
    return DataLoader(rows.select_columns(COLUMNS), batch_size=batch_size, collate_fn=collate)


@dataclass
class Evaluation:
    """The evaluation of a run in training.

    `split` is called with each micro-batch that does not fit and is split; `skip` with that of a row that does not fit
    alone, without which there is no loss.
    """

    step: Step
    rows: Any
    collate: MicroBatches
    batch_size: int
    split: Callable[[Inputs], None]
    skip: Callable[[Inputs], None]
    limit: oom_retry.Limit = field(default_factory=oom_retry.Limit)

    def loss(self, steps: Iterable[list[Inputs]] | None = None) -> float | None:
        """Mean loss in nats per trained token, of `steps` or of all rows; None where a row does not fit."""
        try:
            total, count = ranks.summed(self.sums(steps)).tolist()
        except DoesNotFit as row:
            if self.step.world_size > 1:  # the others wait for this one's sums
                raise
            self.skip(row.inputs)
            return None
        found: float = total / count
        return found

    def batches(self) -> Iterable[list[Inputs]]:
        """All rows, in their order."""
        return loader(self.rows, self.collate, self.batch_size)

    def sums(self, steps: Iterable[list[Inputs]] | None = None) -> torch.Tensor:
        """See `summed_loss`."""
        return summed_loss(
            self.step.model,
            steps or self.batches(),
            self.limit,
            self.split,
            precision=self.step.precision,
            masked=self.step.masked,
        )


def held_out_loss(model: Any, tokenizer: Any, rows: Any, config: Config) -> float:
    """Mean loss in nats per trained token of a model that is not in training, in the run's precision and tiles."""
    training = config.training
    log_probs.attach(model)
    collate = MicroBatches(MicroBatching.of(training, config.data), tokenizer.pad_token_id)
    with without_cudnn_attention(), log_probs.tiles(config.memory.loss_tokens):
        masked = needs_mask(model.config, training.precision, capability_of(model.device))
        steps = loader(rows, collate, training.batch_size)
        total, count = summed_loss(model, steps, precision=training.precision, masked=masked).tolist()
    return total / count
