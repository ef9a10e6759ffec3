"""Held-out loss: nats per trained token over all rows, the same whatever the micro-batch.

transformers' own evaluation averages the means of batches, so that a short answer weighs as much as a long one and
the number changes with the batch size. No logits are kept: TRL's fused head scores the tokens in tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import send_to_device
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from finetune.config import Config
from finetune.data.batching import MicroBatching
from finetune.errors import OutOfMemoryError
from finetune.measure.out_of_memory import is_out_of_memory
from finetune.model.base import autocast
from finetune.model.causality import capability_of, needs_mask
from finetune.runtime.libraries import replaced, without_cudnn_attention
from finetune.training import oom_retry
from finetune.training.collator import Inputs, MicroBatches, for_model


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
    tell: Callable[[Inputs], None] = lambda part: None,
    *,
    masked: bool,
) -> torch.Tensor:
    """(sum of the trained tokens' losses in nats, their number) over `steps`, float64, on the model's device.

    Each is a list of micro-batches, as in training. Nothing but the two sums is kept of one. Those that do not fit
    are split, which `limit` remembers and `tell` is told. With `masked` the model is given the padding mask.

    `model` must have TRL's fused head. Raises DoesNotFit where a row alone does not fit.
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
                    sums += _sums(model, for_model(parts[0], masked=masked))
                    del parts[0]
                    continue
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if not limit.lower(parts[0]):
                        raise DoesNotFit(parts[0], (str(error).splitlines() or ["no memory left"])[0]) from None
                oom_retry.release()
                tell(parts[0])
                parts = limit.parts(parts)
    finally:
        model.train(was_training)
    return sums


def _sums(model: Any, batch: Inputs) -> torch.Tensor:
    outputs = model(**send_to_device(batch, model.device), fused_lm_head=True)
    return torch.stack([-outputs.log_probs.double().sum(), outputs.label_mask.double().sum()])


def held_out_loss(model: Any, tokenizer: Any, rows: Any, config: Config) -> float:
    """Mean loss in nats per trained token of a model that is not in training, in the run's precision and tiles."""
    training = config.training
    unwrapped = model.get_base_model() if hasattr(model, "peft_config") else model
    add_fused_lm_head(unwrapped, outputs=("log_probs",))
    steps = torch.utils.data.DataLoader(
        rows.select_columns(["input_ids", "labels"]),
        batch_size=training.batch_size,
        collate_fn=MicroBatches(MicroBatching.of(training, config.data), tokenizer.pad_token_id),
    )
    with (
        autocast(training.precision, model.device),
        without_cudnn_attention(),
        replaced(chunked_logprob, "TOKEN_CHUNK_SIZE", config.memory.loss_tokens),
    ):
        masked = needs_mask(model.config, training.precision, capability_of(model.device))
        total, count = summed_loss(model, steps, masked=masked).tolist()
    return total / count
