"""Warm-up with the largest batch: a step on it before the first one, after which all state is restored.

A job that does not fit fails in the first minute rather than hours later at the longest row, and the allocator's blocks
have their final size from the start (PyTorch's performance tuning guide, "Preallocate memory in case of variable input
length").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from finetune.data.batching import LargestBatch, Sizes, chosen_rows, per_step, worst_batches
from finetune.data.encoded import IGNORE, TEACHER, segments_of
from finetune.measure.monitor import Monitor, Peak
from finetune.model.distributed import optimizer_states
from finetune.training.batches import Steps
from finetune.training.collator import Inputs
from finetune.training.eval_loss import EvalLoss
from finetune.training.oom_retry import Retry, StepStart
from finetune.training.step import Step


def warm_up(step: Step, steps: Steps, retry: Retry, evaluation: EvalLoss | None) -> dict[str, Peak]:
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
    monitor.run = before
    count_tensors(monitor, peaks)
    kept.put_back()
    return peaks


def count_tensors(monitor: Monitor, peaks: dict[str, Peak]) -> None:
    """Record the tensor counts of a warm-up's `peaks` as those of the run; its other peaks come from its steps.

    Tensors are counted in the warm-up only, whose batch is the one that is forecast.
    """
    for phase, peak in peaks.items():
        if "resident_bytes" in peak and "allocated_bytes" in peak:
            monitor.run[phase] = {**monitor.run.get(phase, {}), "allocated_bytes": peak["allocated_bytes"]}


def _run_largest(step: Step, steps: Steps, retry: Retry, evaluation: EvalLoss | None) -> None:
    engine, monitor = step.engine, step.monitor
    _without_effect(step, engine.make_states)
    step_rows = steps.batch_size * step.context // engine.world_size
    bounds = [each.tokens for each in step.levels.shorter] if step.levels else []
    for batch, inputs in itertools.chain(*(_largest(steps.rows, steps, step_rows, most) for most in (None, *bounds))):
        # With gradient accumulation, gradients of earlier micro-batches exist while later ones run.
        micro_batches = per_step(step_rows, steps.collate.way, batch)
        passes = min(2, micro_batches)
        # The micro-batches of a step are in host memory until the next one; on a CPU that memory is measured.
        waiting = []
        if step.device.type == "cpu":
            waiting = [inputs, *(deepcopy(inputs) for _ in range(micro_batches - 1))]
        count = engine.warm_up_count(int(step.objective.count(inputs)))
        retry.forward_backward(step, [inputs] * passes, count)
        _without_effect(step, engine.empty_update)
    if evaluation:
        for _, inputs in _largest(evaluation.rows, steps, step_rows):
            with monitor.phase("evaluation"):
                evaluation.loss([[inputs]])
    del waiting


def _largest(
    rows: Any, steps: Steps, step_rows: int, most_tokens: int | None = None
) -> Iterator[tuple[LargestBatch, Inputs]]:
    """The shapes that need most memory, of rows of at most `most_tokens`, each with a micro-batch of that shape."""
    way = steps.collate.way
    sizes = Sizes.of(rows, way)
    for batch in worst_batches(sizes.no_longer(most_tokens), way, step_rows, "the data's rows"):
        chosen = [{**row, "shared": way.shared(row)} for row in map(rows.__getitem__, chosen_rows(sizes, batch))]
        if way.layout.apart:
            chosen = [longer_segment(row) for row in chosen]
        if batch.packed:  # fills it to the last token, as other rows may
            chosen = [cut(*each) for each in zip(chosen, batch.by_row, batch.shared_by_row, strict=True)]
        chosen = labelled(chosen, batch.trained_tokens)
        yield batch, steps.collate.micro_batch([*map(in_both_passes, chosen)] if way.layout.apart else chosen)


def longer_segment(row: dict[str, Any]) -> dict[str, Any]:
    """A row with only the longer of two segments that go through the model apart, since either pass may be the larger
    one.
    """
    longest = max(segments_of(row), key=lambda segment: len(segment.input_ids))
    ids, labels = longest.input_ids, longest.labels
    return {**row, "input_ids": ids, "labels": labels, "segments": [len(ids)]}


def in_both_passes(row: dict[str, Any]) -> dict[str, Any]:
    """A row of one segment with that as its second one as well."""
    return {**row, **{name: [*row[name], *row[name]] for name in ("input_ids", "labels", "segments")}}


def cut(row: dict[str, Any], computed: Sequence[int], shared: int) -> dict[str, Any]:
    """A row with each segment cut to its number of `computed` tokens, to which the `shared` ones are added."""
    lengths = [computed[0], *(length + shared for length in computed[1:])]
    kept = [segment.cut(length) for segment, length in zip(segments_of(row), lengths, strict=True)]
    ids, labels = ([part for segment in kept for part in getattr(segment, name)] for name in ("input_ids", "labels"))
    named = {"segments": lengths, "shared": shared} if "segments" in row else {}
    each = len(row[TEACHER[0]]) // len(row["input_ids"]) if TEACHER[0] in row else 0
    # Rows with a teacher have one segment.
    teacher = {name: row[name][: each * len(ids)] for name in TEACHER if name in row}
    return {**row, "input_ids": ids, "labels": labels, **named, **teacher}


def labelled(rows: Sequence[dict[str, Any]], trained_tokens: int) -> list[dict[str, Any]]:
    """`rows` with labels on `trained_tokens` tokens, if they have fewer: shorter rows may have more than the longest.

    The first token of a segment gets none, because nothing predicts it, nor do those that it shares with the first.
    """
    missing = trained_tokens - sum(segment.trained for row in rows for segment in segments_of(row))
    more: list[dict[str, Any]] = []
    for row in rows:
        labels: list[int] = []
        for number, segment in enumerate(segments_of(row)):
            first = 1 + (row.get("shared", 0) if number else 0)
            free = [at for at, label in enumerate(segment.labels) if at >= first and label == IGNORE]
            free = free[: max(missing, 0)]
            missing -= len(free)
            for at in free:
                segment.labels[at] = segment.input_ids[at]
            labels += segment.labels
        more.append({**row, "labels": labels})
    return more


def _without_effect(step: Step, update: Callable[[float], None]) -> None:
    """Run an engine's `make_states` or `empty_update`, hidden from the scaler and the schedule."""
    with step.monitor.phase("optimizer"):
        update(step.max_grad_norm)
    step.model.zero_grad(set_to_none=True)


class _BeforeWarmUp:
    """The state that the warm-up changes: optimizer states, `size_bytes` of copies on the host, and the start."""

    def __init__(self, step: Step) -> None:
        self._model = step.model
        self._device = step.device
        self._was_training = step.model.training
        self._start = StepStart(step)
        self._optimizer = step.engine.optimizer
        if isinstance(self._optimizer, Optimizer8bit):
            # States that exist are restored rather than removed, for bitsandbytes never frees managed memory.
            optimizer_states.make_empty(self._optimizer)
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
        if self._device.type == "cuda":
            # Paged states are written as host memory, bypassing the stream of their update (`patches.SYNC_GPU`).
            torch.cuda.synchronize(self._device)
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
