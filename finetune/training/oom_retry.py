"""Out-of-memory retry: the micro-batch that did not fit is split, and the step begun again.

The loss of a step is a sum over its tokens, divided by their number in the whole step. So micro-batches may be split
anywhere between rows: the gradient is the same but for the order in which its terms are added.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from finetune.measure.out_of_memory import is_out_of_memory
from finetune.runtime import libraries
from finetune.runtime.randomness import RandomState
from finetune.training.collator import Inputs, first_row, split
from finetune.training.step import Count, Step


class Limit:
    """From which size on micro-batches are split: that of the smallest found not to fit, in places (rows x tokens)."""

    def __init__(self) -> None:
        self.places: int | None = None

    def parts(self, micro_batches: Iterable[Inputs]) -> list[Inputs]:
        """The micro-batches, each halved until it is below the limit or a single row."""
        found: list[Inputs] = []
        for inputs in micro_batches:
            halves = split(inputs) if self.places is not None and _places(inputs) >= self.places else None
            found += self.parts(halves) if halves else [inputs]
        return found

    def lower(self, inputs: Inputs) -> bool:
        """Learn that `inputs` does not fit; False where that changes nothing: it cannot be split, or was to be."""
        if split(inputs) is None or (self.places is not None and _places(inputs) >= self.places):
            return False
        self.places = _places(inputs)
        return True


def _places(inputs: Inputs) -> int:
    return inputs["input_ids"].numel()


@dataclass
class Retry:
    """Runs steps and updates, and repeats them after memory ran out. `limit` is remembered from step to step.

    `split` is called with a micro-batch that was split; `give_up` with the error and the micro-batch of one row that
    does not fit, when all passes of the step are undone; `updated_again` before an update is repeated.
    """

    split: Callable[[Inputs], None]
    give_up: Callable[[BaseException, Inputs], None]
    updated_again: Callable[[], None]
    limit: Limit = field(default_factory=Limit)

    def forward_backward(self, step: Step, micro_batches: list[Inputs], count: Count) -> torch.Tensor:
        """`Step.forward_backward`. Raises what it raises for a single row, after `give_up`, and of several ranks.

        They wait for each other in the last backward pass, so that none can do its step again alone.
        """
        start = StepStart(step)
        while True:
            step.under_way = None  # memory may run out before any: then none of them is to be split
            try:
                return step.forward_backward(self.limit.parts(micro_batches), count)
            except (MemoryError, RuntimeError) as error:
                too_large = step.under_way
                if not is_out_of_memory(error) or step.world_size > 1 or too_large is None:
                    raise
                if not self.limit.lower(too_large):
                    start.restore()
                    self.give_up(error, too_large)
                    raise
            # Here the error is gone, and with it what the frames of the failed pass held.
            start.restore()
            release()
            self.split(too_large)

    def update(self, step: Step) -> None:
        """`Step.update`, once more with freed memory where it ran out before anything was changed."""
        start = UpdateStart(step.optimizer)
        try:
            step.update()
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not start.undo():
                error.add_note(
                    "The optimizer had changed some weights and not others, so that this step cannot be done again; "
                    "the checkpoints before it are untouched."
                )
                raise
        release()
        self.updated_again()
        step.update()


class StepStart:
    """Where a step began: random numbers. Its gradients began as none, its weights have not changed."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._random = RandomState()

    def restore(self) -> None:
        """Undo all forward and backward passes since."""
        self._step.model.zero_grad(set_to_none=True)
        self._random.restore()


def release(error: BaseException | None = None) -> None:
    """Give back the memory of a pass that failed: what its frames hold, if `error` is still needed, and caches."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    libraries.return_freed_memory()


class UpdateStart:
    """Where an update began, to tell after a failure whether any weight or optimizer state was changed by it.

    Optimizers update tensor by tensor, and an update that stopped between two of them cannot be undone without a copy
    of everything. It can be told: torch counts the changes of each tensor; bitsandbytes' kernels write past that count,
    but its update of a tensor begins with counting the steps of its state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = {weight: _changes(weight) for weight in _weights(optimizer)}
        self._states = {weight: _marks(state) for weight, state in optimizer.state.items()}

    def undo(self) -> bool:
        """Remove the states that were made since, and whether this leaves everything as it was."""
        states = self._optimizer.state
        new = [weight for weight in states if weight not in self._states]
        untouched = (
            all(_changes(weight) == before for weight, before in self._weights.items())
            and all(_marks(states[weight]) == before for weight, before in self._states.items())
            and not any(float(states[weight].get("step", 0)) for weight in new)
        )
        if untouched:
            for weight in new:
                del states[weight]
        return untouched


def _weights(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _marks(state: dict[str, Any]) -> dict[str, Any]:
    """Something about each value of a weight's state that a change of it changes."""
    return {
        name: (id(value), _changes(value)) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def _changes(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version  # noqa: SLF001 -- torch counts them for autograd and shows it nowhere else


def place_of(rows: Any, inputs: Inputs) -> str:
    """Where the row of a micro-batch of one stands in its source, found by its tokens in the data set `rows`."""
    ids = first_row(inputs)
    for number, length in enumerate(rows["length"][:]):
        if length == len(ids) and list(rows[number]["input_ids"]) == ids:
            return str(rows[number]["place"])
    return "a row that is not in the data set"
