"""Warm-up with the largest batch: it goes through a step before the first one, and all state is then restored.

A job that does not fit then fails in the first minute and not hours later at the longest row, and the allocator's
blocks have their final size from the start (PyTorch's performance tuning guide, "Preallocate memory in case of variable
input length").
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from finetune.data.batching import Batch, per_step, worst_batches
from finetune.measure.monitor import Peak
from finetune.training.batches import Steps
from finetune.training.collator import Inputs
from finetune.training.evaluation import Evaluation
from finetune.training.oom_retry import Retry, StepStart
from finetune.training.step import Step


def warm_up(step: Step, steps: Steps, retry: Retry, evaluation: Evaluation | None) -> dict[str, Peak]:
    """Put the largest training micro-batches through forward, backward and update, and the largest one to evaluate.

    Weights, optimizer and random numbers are then as before, bit for bit; the peaks are returned. What can be split is,
    and stays so for the run. Raises torch's out of memory, with the row on it, for a row that does not fit by itself.
    """
    kept, monitor = _Kept(step), step.monitor
    before = dict(monitor.run)
    _make_states(step)
    step_rows = steps.batch_size // step.world_size
    for batch, inputs in _largest(steps.rows, steps, step_rows):
        # With accumulation the gradients of an earlier micro-batch are there while a later one runs.
        passes = min(2, per_step(step_rows, steps.collate.way, batch))
        retry.forward_backward(step, [inputs] * passes, max(1, int(step.objective.count(inputs))))
        _update(step)
    if evaluation:
        for _, inputs in _largest(evaluation.rows, steps, step_rows):
            with monitor.phase("evaluation"):
                evaluation.loss([[inputs]])
    peaks = monitor.take_step()
    monitor.run = before  # the peaks of the run are those of its steps; these have an event of their own
    kept.put_back()
    return peaks


def _largest(rows: Any, steps: Steps, step_rows: int) -> Iterator[tuple[Batch, Inputs]]:
    """The shapes that take most memory, each with a micro-batch of it."""
    lengths = rows["length"][:]
    for batch in worst_batches(lengths, rows["trained"][:], steps.collate.way, step_rows, "the data's rows"):
        chosen = [rows[row] for row in longest_rows(lengths, batch)]
        if batch.packed:  # others may fill it to the last token, of which these would leave some
            chosen = [cut(row, length) for row, length in zip(chosen, batch.packed, strict=True)]
        yield batch, steps.collate.micro_batch(chosen)


def cut(row: dict[str, Any], length: int) -> dict[str, Any]:
    """The first tokens of a row."""
    return {name: row[name][:length] for name in ("input_ids", "labels")}


def longest_rows(lengths: Sequence[int], batch: Batch) -> list[int]:
    """The longest rows, by number, that make a micro-batch of that shape."""
    fitting = [row for row, length in enumerate(lengths) if length <= batch.tokens]
    return heapq.nlargest(len(batch.packed) or batch.rows, fitting, key=lengths.__getitem__)


def _make_states(step: Step) -> None:
    """The optimizer's first step: its states are there from the second step of a run on."""
    for weight in step.trained():
        weight.grad = torch.zeros_like(weight)
    _update(step)


def _update(step: Step) -> None:
    """Clipping and the update, past the scaler and the schedule, which are to know nothing of it.

    With gradients of zero and at a rate of zero: it takes the memory of any update, and leaves every weight as it is,
    so that no copy of them is needed.
    """
    optimizer = step.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    with step.monitor.phase("optimizer"):
        for weight in step.trained():
            if weight.grad is not None:
                weight.grad.zero_()
        torch.nn.utils.clip_grad_norm_(step.trained(), step.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    step.model.zero_grad(set_to_none=True)


class _Kept:
    """What all this changes: the optimizer's states, of which host memory has a copy, and where the step began."""

    def __init__(self, step: Step) -> None:
        self._model = step.model
        self._was_training = step.model.training
        self._start = StepStart(step)
        self._optimizer = step.optimizer
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
        self._model.train(self._was_training)


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
