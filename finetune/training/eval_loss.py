"""The loss on the evaluation set, in nats per trained token over all rows, independent of the micro-batch size.

transformers' own evaluation averages the mean losses of batches, so a short answer counts as much as a long one and the
result depends on the batch size. No logits are kept: tokens are scored in tiles.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from finetune.config import Config
from finetune.data.batching import MicroBatching, Sizes, micro_batches
from finetune.data.encoded import RowLayout, columns
from finetune.data.prepare import media_of
from finetune.errors import OutOfMemoryError
from finetune.model.attention import packing
from finetune.model.distributed.placement import release_gathered
from finetune.model.precision import autocast
from finetune.model.probes.causality import capability_of, needs_mask
from finetune.objectives import Loss, Objective, cross_entropy, log_probs, sums
from finetune.runtime import ranks
from finetune.runtime.libraries import without_cudnn_attention
from finetune.runtime.out_of_memory import is_out_of_memory, reason
from finetune.training import oom_retry
from finetune.training.batches import agreed
from finetune.training.collator import Inputs, StepCollator, apart, for_model, micro_batching
from finetune.training.largest_batch import largest_steps
from finetune.training.step import Step


class DoesNotFit(OutOfMemoryError):
    """A micro-batch, `inputs`, does not fit into memory and cannot be split, mostly as it is a single row."""

    def __init__(self, inputs: Inputs, reason: str) -> None:
        super().__init__(f"out of memory in an evaluation, in {inputs['input_ids'].numel()} positions: {reason}")
        self.inputs = inputs


@torch.no_grad()
def summed_loss(
    model: Any, steps: Iterable[list[Inputs]], limit: oom_retry.Limit | None = None,
    on_split: Callable[[Inputs], None] = lambda part: None, *, precision: str, masked: bool, repeatable: bool = True,
    loss: Loss = cross_entropy, step_mean: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum and count of `loss` over `steps` (lists of micro-batches), float64 (2,), on the device.

    By default, the trained tokens' cross-entropy in nats and their number. A micro-batch that does not fit is split:
    `limit` remembers its size, and `on_split` is called with it, unless other ranks wait inside of a pass, so that it
    is not `repeatable`. `precision` is that of training; with `masked` the model gets the padding mask. Batches get
    `step_mean`, if there is one. `model` must have the head of `objectives.log_probs`. Raises DoesNotFit for what
    cannot be split.
    """
    mean = {} if step_mean is None else {"step_mean": step_mean}
    limit = limit or oom_retry.Limit()
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=model.device)
    try:
        for batch in itertools.chain.from_iterable(steps):
            parts = limit.parts([batch])
            while parts:
                try:
                    total += _sums(model, for_model(parts[0], masked=masked) | mean, precision, loss)
                    del parts[0]
                    continue
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if not repeatable or not limit.lower(parts[0]):
                        raise DoesNotFit(parts[0], reason(error)) from None
                oom_retry.release()
                on_split(parts[0])
                parts = limit.parts(parts)
    finally:
        model.train(was_training)
        release_gathered(model)
    return total


def _sums(model: Any, batch: Inputs, precision: str, loss: Loss) -> torch.Tensor:
    """A function of its own, at whose end the batch on the device is freed."""
    with autocast(precision, model.device), packing.known(batch):
        return torch.stack(sums(loss, model, send_to_device(batch, model.device)))


def loader(rows: Any, collate: StepCollator, batch_size: int) -> Iterable[list[Inputs]]:
    """The rows of an evaluation set in order, collated into steps like training rows."""
    return DataLoader(rows.select_columns(columns(rows)), batch_size=batch_size, collate_fn=collate)


class EvaluationReport(Protocol):
    """Writes down what is done about memory that runs out in an evaluation, and tells the user."""

    def split(self, inputs: Inputs) -> None:
        """A micro-batch did not fit, and is split."""

    def skip(self, inputs: Inputs) -> None:
        """A single row did not fit, and the evaluation is skipped."""

    def not_repeatable(self, error: BaseException, inputs: Inputs) -> BaseException:
        """A micro-batch did not fit while other ranks wait. Returns the error with which the run ends."""


class Evaluation(Protocol):
    """What a run is judged by as it trains: the best value decides what is published, and when a run stops early."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value is better."""

    def value(self) -> float | None:
        """The value of the model as it is, the same on all ranks; None if it does not fit into memory."""

    def warm_up(self) -> None:
        """Run the part that takes most memory."""


@dataclass
class EvalLoss:
    """The loss on the evaluation set as a run's `Evaluation`.

    `report` gets each micro-batch that is split because it does not fit, and a single row that does not fit; there is
    then no loss.
    """

    step: Step
    rows: Any
    collate: StepCollator
    batch_size: int
    report: EvaluationReport
    limit: oom_retry.Limit = field(default_factory=oom_retry.Limit)
    higher_is_better: ClassVar[bool] = False

    def value(self, steps: Iterable[list[Inputs]] | None = None) -> float | None:
        """Mean loss in nats per trained token over `steps`, by default all rows; None if a row does not fit a rank.

        What the objective needs the mean of over a step, it gets over all these rows.
        """
        steps, objective, before = steps or self.batches(), self.step.objective, None
        if objective.step_mean:
            before = self._mean(([apart(each) for each in step] for step in steps), objective.step_mean)
            if before is None:
                return None
        mean = self._mean(steps, objective.evaluated, before)
        return None if mean is None else float(mean)

    def _mean(
        self, steps: Iterable[list[Inputs]], loss: Loss, step_mean: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The mean of `loss` over the rows of all ranks, on the device; None if a row does not fit."""
        summed = too_large = None
        repeatable = self.step.engine.repeatable
        if not repeatable:  # a rank whose image breaks has begun no pass that others wait in
            steps = agreed(iter(steps), self.rows)
        # Ranks that exchange weights within a pass cannot wait for each other after it.
        with ranks.agreeing() if repeatable else contextlib.nullcontext():
            try:
                summed = self.sums(steps, loss, step_mean)
            except DoesNotFit as row:
                if not repeatable:
                    raise self.report.not_repeatable(torch.OutOfMemoryError(str(row)), row.inputs) from None
                too_large = row.inputs
        if too_large := next(filter(None, ranks.gathered(too_large)), None):
            self.report.skip(too_large)
            return None
        assert summed is not None, "no rank failed"
        total, count = ranks.summed(summed)
        return total / count

    def warm_up(self) -> None:
        """Evaluate the largest micro-batches."""
        for largest in largest_steps(self.rows, self.collate, self.batch_size):
            with self.step.monitor.phase("evaluation"):
                self.value([[largest.inputs]])

    def batches(self) -> Iterable[list[Inputs]]:
        """All rows in order, as steps."""
        return loader(self.rows, self.collate, self.batch_size)

    def sums(
        self, steps: Iterable[list[Inputs]] | None = None, loss: Loss | None = None,
        step_mean: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `summed_loss`."""
        step = self.step
        return summed_loss(
            step.model, steps or self.batches(), self.limit, self.report.split, precision=step.precision,
            masked=step.masked, repeatable=step.engine.repeatable, loss=loss or step.objective.evaluated,
            step_mean=step_mean,
        )  # fmt: skip


@dataclass(frozen=True)
class HeldOut:
    """A model outside training, which goes through held-out rows with its run's precision and tile size."""

    model: Any
    tokenizer: Any
    config: Config

    def loss(
        self, rows: Any, way: MicroBatching | None = None, batch_size: int | None = None
    ) -> tuple[float, torch.Tensor]:
        """Mean loss in nats per trained token, and that of the rows.

        Those are each row's (sum of the losses in nats, number of trained tokens), float64 (rows, 2), on the CPU; their
        order depends on the rows, `way` and `batch_size` alone, by default those of the config.
        """
        way = way or micro_batching(self.config)
        way = replace(way, layout=replace(way.layout, values=()))  # such as a reference, which no token's loss needs
        batch_size = batch_size or self.config.training.batch_size
        (total, count), by_row = self._watched(rows, cross_entropy, _sums_by_row, way, batch_size)
        return total / count, by_row

    def sums(
        self, rows: Any, layout: RowLayout, loss: Loss, part: Callable[[Inputs], Inputs] = lambda inputs: inputs
    ) -> tuple[float, float]:
        """The sum and count of `loss` over rows of a layout, one row after the other.

        Of a row's micro-batch, `part` goes through the model.
        """
        way = MicroBatching(1, layout=layout)
        (total, count), _ = self._watched(rows, loss, lambda *_: torch.zeros(0), way, 1, part)
        return total, count

    def scores(self, rows: Any, objective: Objective) -> tuple[float, torch.Tensor]:
        """The mean loss of rows under a model that scores sequences, and the scores, float64, on the CPU.

        Those are (rows, sequences, labels), in the order of `rows`, each of its sequence's last trained token.
        """
        training = self.config.training
        way, each = MicroBatching.of(training, self.config.data, objective.layout), training.batch_size
        (total, count), scores = self._watched(
            rows, objective.evaluated, lambda batch, outputs: outputs.logits.double(), way, each
        )
        order: list[int] = []
        lengths = Sizes.of(rows, way).lengths
        for start in range(0, len(rows), each):
            order += [start + row for part in micro_batches(lengths[start : start + each], way) for row in part]
        scores = scores.view(len(rows), objective.layout.sequences, -1)
        return total / count, torch.empty_like(scores).index_copy_(0, torch.tensor(order), scores)

    def _watched(
        self, rows: Any, loss: Loss, read: Callable[[Inputs, Any], torch.Tensor], way: MicroBatching, batch_size: int,
        part: Callable[[Inputs], Inputs] = lambda inputs: inputs,
    ) -> tuple[list[float], torch.Tensor]:  # fmt: skip
        """The sum and count of `loss` over `rows`, and what is `read` of each micro-batch's output, on the CPU."""
        model, config = self.model, self.config
        precision = config.training.precision
        log_probs.attach(model)
        media = media_of(config.model, config.data, self.tokenizer, model.config)
        collate = StepCollator(way, self.tokenizer.pad_token_id, media=media)
        by_row: list[torch.Tensor] = []
        watching = model.register_forward_hook(
            lambda model, _, batch, outputs: by_row.append(read(batch, outputs)), with_kwargs=True
        )
        try:
            with without_cudnn_attention(), log_probs.tiles(config.memory.loss_tokens):
                masked = needs_mask(model.config, precision, capability_of(model.device))
                steps = ([*map(part, step)] for step in loader(rows, collate, batch_size))
                summed = summed_loss(model, steps, precision=precision, masked=masked, loss=loss)
        finally:
            watching.remove()
        return summed.tolist(), torch.cat(by_row).cpu()


def _sums_by_row(batch: Inputs, outputs: Any) -> torch.Tensor:
    """(sum of losses, trained tokens) of each row of a micro-batch, float64 (rows, 2)."""
    # The head's output at a place is that of the token after it.
    losses, counts = -outputs.log_probs.double(), outputs.label_mask.double()  # (rows, tokens - 1)
    if "cu_seq_lens_q" not in batch:
        return torch.stack([losses.sum(1), counts.sum(1)], dim=1)
    first, *others = batch["cu_seq_lens_q"].diff().tolist()
    parts = [values[0].split([first - 1, *others]) for values in (losses, counts)]
    return torch.stack([torch.stack([part.sum() for part in one]) for one in parts], dim=1)
