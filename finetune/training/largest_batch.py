"""Warm-up with the largest batch: a step on it before the first one, after which all state is restored.

A job that does not fit fails in the first minute rather than hours later at the longest row, and the allocator's blocks
have their final size from the start (PyTorch's performance tuning guide, "Preallocate memory in case of variable input
length").
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from finetune.data.batching import Batch, Sizes, longest_first, per_step, worst_batches
from finetune.data.encoded import segments_of
from finetune.measure.monitor import Peak
from finetune.model.distributed import sharding
from finetune.training.batches import Steps
from finetune.training.collator import Inputs
from finetune.training.eval_loss import Evaluation
from finetune.training.oom_retry import Retry, StepStart
from finetune.training.step import Step


def warm_up(step: Step, steps: Steps, retry: Retry, evaluation: Evaluation | None) -> dict[str, Peak]:
    """Run the largest training micro-batches through a step, and the largest evaluation micro-batch; return the peaks.

    Weights, optimizer state and random state are restored bit for bit. Micro-batches that do not fit are split, and
    stay split for the run. Of micro-batches that recompute less because they are short, the largest are run as well.
    Raises torch's out-of-memory error, naming the row, for a single row that does not fit.
    """
    kept, monitor = _BeforeWarmUp(step), step.monitor
    before = dict(monitor.run)
    with monitor.counting_tensors(kept.size_bytes):
        _run_largest(step, steps, retry, evaluation)
    peaks = monitor.take_step()
    # The run's peaks are those of its steps, and these have their own event; but tensors are counted here alone, where
    # the batch is the one that is forecast.
    monitor.run = before
    for phase, peak in peaks.items():
        if "resident_bytes" in peak and "allocated_bytes" in peak:
            monitor.run[phase] = {**before.get(phase, {}), "allocated_bytes": peak["allocated_bytes"]}
    kept.put_back()
    return peaks


def _run_largest(step: Step, steps: Steps, retry: Retry, evaluation: Evaluation | None) -> None:
    monitor = step.monitor
    if step.zero is None:
        _make_states(step)
    step_rows = steps.batch_size * step.context // step.world_size
    bounds = [each.tokens for each in step.levels.shorter] if step.levels else []
    for batch, inputs in itertools.chain(*(_largest(steps.rows, steps, step_rows, most) for most in (None, *bounds))):
        # With gradient accumulation, gradients of earlier micro-batches exist while later ones run.
        passes = min(2, per_step(step_rows, steps.collate.way, batch))
        # DeepSpeed drops gradients only where they are not finite: those of a loss that is divided by zero.
        count = 0 if step.zero else max(1, int(step.objective.count(inputs)))
        retry.forward_backward(step, [inputs] * passes, count)
        _update(step)
    if evaluation:
        for _, inputs in _largest(evaluation.rows, steps, step_rows):
            with monitor.phase("evaluation"):
                evaluation.loss([[inputs]])


def _largest(rows: Any, steps: Steps, step_rows: int, most_tokens: int | None = None) -> Iterator[tuple[Batch, Inputs]]:
    """The shapes that need most memory, of rows of at most `most_tokens`, each with a micro-batch of that shape."""
    way = steps.collate.way
    sizes = Sizes.of(rows, way)
    for batch in worst_batches(sizes.no_longer(most_tokens), way, step_rows, "the data's rows"):
        chosen = [rows[row] for row in longest_rows(sizes.lengths, batch)]
        if batch.packed:  # fills it to the last token, as other rows may
            chosen = [cut(row, *lengths) for row, lengths in zip(chosen, batch.by_row, strict=True)]
        yield batch, steps.collate.micro_batch(chosen)


def cut(row: dict[str, Any], *lengths: int) -> dict[str, Any]:
    """A row with each segment cut to its length."""
    kept = [segment.cut(length) for segment, length in zip(segments_of(row), lengths, strict=True)]
    ids, labels = ([part for segment in kept for part in getattr(segment, name)] for name in ("input_ids", "labels"))
    return {**row, "input_ids": ids, "labels": labels, **({"segments": list(lengths)} if "segments" in row else {})}


def longest_rows(lengths: Sequence[int], batch: Batch) -> list[int]:
    """Indices of the longest rows that form a micro-batch of this shape."""
    return [row for row in longest_first(lengths) if lengths[row] <= batch.tokens][: len(batch.by_row)]


def _make_states(step: Step) -> None:
    """Create the optimizer states, as the first step does: all later steps have them."""
    for weight in step.trained():
        weight.grad = torch.zeros_like(weight)
    _update(step)


def _update(step: Step) -> None:
    """Clip and update without the scaler and the schedule, which must not see this step.

    Gradients and learning rate are zero: it needs the memory of any update but leaves the weights unchanged, so no copy
    of them is needed.
    """
    if step.zero:
        with step.monitor.phase("optimizer"):
            step.clip()
        return
    optimizer = step.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    with step.monitor.phase("optimizer"):
        for weight in step.trained():
            if weight.grad is not None:
                weight.grad.zero_()
        sharding.clip_grad_norm_(step.trained(), step.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    step.model.zero_grad(set_to_none=True)


class _BeforeWarmUp:
    """The state that the warm-up changes: optimizer states, copied to host memory, and the start of the step.

    `size_bytes` is the size of the copies, which other steps do not have.
    """

    def __init__(self, step: Step) -> None:
        self._model = step.model
        self._was_training = step.model.training
        self._start = StepStart(step)
        self._optimizer = step.optimizer
        if isinstance(self._optimizer, Optimizer8bit):
            make_empty_states(self._optimizer)
        copies: dict[int, Any] = {}  # bitsandbytes' quantization map is one tensor, which all weights share
        for state in self._optimizer.state.values():
            for value in state.values():
                if id(value) not in copies:
                    copies[id(value)] = _copy(value)
        self.size_bytes = sum(copy.nbytes for copy in copies.values() if isinstance(copy, torch.Tensor))
        self._states = {
            weight: {name: (value, copies[id(value)]) for name, value in state.items()}
            for weight, state in self._optimizer.state.items()
        }

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore in place, so that paged states stay paged; states that did not exist before are removed."""
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
    """A copy in host memory, or None for an all-zero tensor, as most states are before the first step."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", copy=True) if value.any() else None


def make_empty_states(optimizer: Optimizer8bit) -> None:
    """Create the states as bitsandbytes does at a weight's first update (0.50, `Optimizer8bit.step`).

    They are then restored rather than removed, because bitsandbytes never frees managed memory.
    """
    for group_number, group in enumerate(optimizer.param_groups):
        for number, weight in enumerate(group["params"]):
            if weight.requires_grad and not optimizer.state[weight]:
                optimizer.init_state(group, weight, group_number, number)
