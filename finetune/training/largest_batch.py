"""The worst first: before the first step the largest batches go through a step, and all is put back as it was.

What does not fit is then known in the first minute and not in the hour that the longest row comes by, and the
allocator's blocks have their final size from the beginning (PyTorch's performance tuning guide, "Preallocate memory in
case of variable input length").
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from finetune.data.batching import Batch, per_step, worst_batches
from finetune.measure.monitor import LeakWatch
from finetune.training import oom_retry
from finetune.training.collator import Inputs
from finetune.training.evaluation import DoesNotFit

if TYPE_CHECKING:
    from finetune.training.trainer import Trainer


def rehearse(trainer: Trainer) -> None:
    """Put the largest training micro-batches through forward, backward and update, and the largest held-out one.

    Weights, optimizer, random numbers and counts are then as before, bit for bit. What can be split is, and stays so
    for the run. Raises torch's out of memory, with the row on it, for a row that does not fit by itself.
    """
    started = time.perf_counter()
    monitor = trainer.monitor
    kept = _Kept(trainer)
    before = dict(monitor.run)
    _make_states(trainer)
    for batch, inputs in _largest(trainer, trainer.train_dataset):
        # With accumulation the gradients of an earlier micro-batch are there while a later one runs.
        passes = min(2, per_step(_step_rows(trainer), trainer.data_collator.way, batch))
        trained_tokens = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        trainer.training_step(trainer.model_wrapped, inputs * passes, trained_tokens)
        _update(trainer)
    if trainer.eval_dataset is not None:
        for _, inputs in _largest(trainer, trainer.eval_dataset):
            with monitor.phase("evaluation"):
                _evaluate(trainer, inputs)
    peaks = monitor.take_step()
    monitor.run = before  # the peaks of the run are those of its steps; these have an event of their own
    trainer.leaks = LeakWatch()
    kept.put_back()
    seconds = round(time.perf_counter() - started, 3)
    trainer.run.event("worst_batch_fits", step=trainer.state.global_step, seconds=seconds, memory=peaks)


def _evaluate(trainer: Trainer, inputs: list[Inputs]) -> None:
    try:
        trainer.held_out_sums([inputs])
    except DoesNotFit as row:
        if trainer.args.world_size > 1:  # as in the evaluation itself
            raise
        trainer.tell_no_evaluation(row)


def _largest(trainer: Trainer, rows: Any) -> Iterator[tuple[Batch, list[Inputs]]]:
    """The shapes that take most memory, each with a micro-batch of it."""
    way, step_rows = trainer.data_collator.way, _step_rows(trainer)
    lengths = rows["length"][:]
    for batch in worst_batches(lengths, rows["trained"][:], way, step_rows, "the data's rows"):
        chosen = [rows[row] for row in longest_rows(lengths, batch)]
        if batch.packed:  # others may fill it to the last token, of which these would leave some
            chosen = [cut(row, length) for row, length in zip(chosen, batch.packed, strict=True)]
        yield batch, [trainer.data_collator.micro_batch(chosen)]


def _step_rows(trainer: Trainer) -> int:
    """Rows of a step that one process takes."""
    return int(trainer.args.per_device_train_batch_size) // int(trainer.args.world_size)


def cut(row: dict[str, Any], length: int) -> dict[str, Any]:
    """The first tokens of a row."""
    return {name: row[name][:length] for name in ("input_ids", "labels")}


def longest_rows(lengths: Sequence[int], batch: Batch) -> list[int]:
    """The longest rows, by number, that make a micro-batch of that shape."""
    fitting = [row for row, length in enumerate(lengths) if length <= batch.tokens]
    return heapq.nlargest(len(batch.packed) or batch.rows, fitting, key=lengths.__getitem__)


def _make_states(trainer: Trainer) -> None:
    """The optimizer's first step: its states are there from the second step of a run on."""
    for weight in _trained(trainer):
        weight.grad = torch.zeros_like(weight)
    _update(trainer)


def _update(trainer: Trainer) -> None:
    """Clipping and the update, past the scaler and the schedule, which are to know nothing of it.

    With gradients of zero and at a rate of zero: it takes the memory of any update, and leaves every weight as it is,
    so that no copy of them is needed.
    """
    optimizer = trainer.optimizer.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    with trainer.monitor.phase("optimizer"):
        for weight in _trained(trainer):
            if weight.grad is not None:
                weight.grad.zero_()
        torch.nn.utils.clip_grad_norm_(_trained(trainer), trainer.args.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    trainer.model.zero_grad(set_to_none=True)


def _trained(trainer: Trainer) -> list[torch.nn.Parameter]:
    return [weight for weight in trainer.model.parameters() if weight.requires_grad]


class _Kept:
    """What all this changes: the optimizer's states, of which host memory has a copy, and where the step began."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._was_training = trainer.model.training
        self._start = oom_retry.StepStart(trainer)
        self._optimizer = trainer.optimizer.optimizer
        if isinstance(self._optimizer, Optimizer8bit):
            _make_empty_states(self._optimizer)
        copies: dict[int, Any] = {}  # bitsandbytes' quantization map is one tensor, which all weights share
        for state in self._optimizer.state.values():
            for value in state.values():
                if id(value) not in copies:
                    copies[id(value)] = _copy(value)
        self._states = {
            weight: {name: (value, copies[id(value)]) for name, value in state.items()}
            for weight, state in self._optimizer.state.items()
        }

    @torch.no_grad()
    def put_back(self) -> None:
        """Into the same tensors, so that a paged state stays paged. A state that was not there goes again."""
        states = self._optimizer.state
        for weight in list(states):
            if weight not in self._states:
                del states[weight]
        for weight, state in self._states.items():
            for name in states[weight].keys() - state.keys():
                del states[weight][name]
            for name, (value, copy) in state.items():
                if isinstance(value, torch.Tensor):
                    value.zero_() if copy is None else value.copy_(copy)
                states[weight][name] = value
        self._start.restore()
        self._trainer.model.train(self._was_training)


def _copy(value: Any) -> Any:
    """A tensor in host memory, None for one of zeros only: so are most states before the first step."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", copy=True) if value.any() else None


def _make_empty_states(optimizer: Optimizer8bit) -> None:
    """The states as bitsandbytes makes them when it first comes to a weight (0.50, `Optimizer8bit.step`).

    To be put back and not to go again: what it takes as managed memory it never frees.
    """
    for group_number, group in enumerate(optimizer.param_groups):
        for number, weight in enumerate(group["params"]):
            if weight.requires_grad and not optimizer.state[weight]:
                optimizer.init_state(group, weight, group_number, number)
