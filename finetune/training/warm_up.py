"""Warm-up with the largest batch: a step on it before the first one, after which all state is restored.

A job that does not fit fails in the first minute rather than hours later at the longest row, and the allocator's blocks
have their final size from the start (PyTorch's performance tuning guide, "Preallocate memory in case of variable input
length").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from finetune.model.distributed import optimizer_states
from finetune.runtime.memory_monitor import Peak
from finetune.training.batches import StepSource
from finetune.training.eval_loss import Evaluation
from finetune.training.oom_retry import Retry, StepStart
from finetune.training.step import Step


def warm_up(step: Step, steps: StepSource, retry: Retry, evaluation: Evaluation | None) -> dict[str, Peak]:
    """Run the largest training micro-batches through a step, and the largest evaluation micro-batch; return the peaks.

    Weights, optimizer state and random state are restored bit for bit. Micro-batches that do not fit are split, and
    stay split for the run. Of micro-batches that recompute less because they are short, the largest are run as well.
    Raises torch's out-of-memory error, naming the row, for a single row that does not fit.
    """
    kept, monitor = _BeforeWarmUp(step), step.monitor
    before = dict(monitor.peaks)
    with monitor.counting_tensors(kept.size_bytes):
        _run_largest(step, steps, retry, evaluation)
    peaks = monitor.take_step()
    # The run's peaks come from its steps; tensors are counted here alone, on the batch of the forecast.
    monitor.peaks = before
    for phase, peak in peaks.items():
        if "resident_bytes" in peak and "allocated_bytes" in peak:
            monitor.peaks[phase] = {**monitor.peaks.get(phase, {}), "allocated_bytes": peak["allocated_bytes"]}
    kept.put_back()
    return peaks


def _run_largest(step: Step, steps: StepSource, retry: Retry, evaluation: Evaluation | None) -> None:
    engine = step.engine
    _without_effect(step, engine.make_states)
    bounds = [each.tokens for each in step.levels.shorter] if step.levels else []
    for largest in itertools.chain(*(steps.largest(most) for most in (None, *bounds))):
        inputs = largest.inputs
        # With gradient accumulation, gradients of earlier micro-batches exist while later ones run.
        passes = min(2, largest.micro_batches)
        # The micro-batches of a step are in host memory until the next one; on a CPU that memory is measured.
        waiting = []
        if step.device.type == "cpu":
            waiting = [inputs, *(deepcopy(inputs) for _ in range(largest.micro_batches - 1))]
        count = engine.warm_up_count(int(step.objective.count(inputs)))
        retry.fitting_forward_backward(step, [inputs] * passes, count)
        _without_effect(step, engine.empty_update)
    if evaluation:
        evaluation.warm_up()
    del waiting


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
                if id(value) in copies:
                    continue
                copies[id(value)] = value
                if isinstance(value, torch.Tensor):  # all zero, as most are before the first step, needs no copy
                    copies[id(value)] = value.detach().to("cpu", copy=True) if value.any() else None
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
