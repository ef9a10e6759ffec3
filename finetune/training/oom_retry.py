"""Out-of-memory retry: the micro-batch that did not fit is split, and the step restarted.

The loss of a step is a sum divided by a count over the whole step. So micro-batches may be split anywhere between
rows, never between the segments of one: the gradient is the same up to the order of summation. With several ranks, all
learn at the end of a step whether memory ran out on any; then they lower the limit alike and repeat the step.

Ranks that exchange more than gradients cannot: the others wait within the pass for the one that failed. That one
records a smaller micro-batch, which the next start of the run takes, and all end.
"""

from __future__ import annotations

import functools
import hashlib
import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed import DistError

from finetune.config import Config
from finetune.data.encoded import MEDIA, MISMATCHED, segments_of
from finetune.model.distributed import optimizer_states
from finetune.runtime import libraries, ranks
from finetune.runtime.out_of_memory import StepOutOfMemoryError, is_out_of_memory, reason
from finetune.runtime.randomness import RandomState
from finetune.training.collator import Inputs, first_row, halved, row_count, tokens_a_row
from finetune.training.step import LossCount, Step


class Limit:
    """The sizes from which micro-batches are split: those that did not fit, in positions (rows x tokens) and pixels.

    A micro-batch is split if it has as many of both as one that did not fit.
    """

    def __init__(self) -> None:
        self._too_large: list[tuple[int, int]] = []

    @property
    def lowered(self) -> bool:
        """Whether a micro-batch did not fit."""
        return bool(self._too_large)

    def parts(self, micro_batches: Iterable[Inputs]) -> list[Inputs]:
        """The micro-batches, each halved until it is below the limit or a single row."""
        parts: list[Inputs] = []
        for inputs in micro_batches:
            positions, pixels = _positions(inputs), _pixels(inputs)
            too_large = any(positions >= most[0] and pixels >= most[1] for most in self._too_large)
            halves = halved(inputs) if too_large else None
            parts += self.parts(halves) if halves else [inputs]
        return parts

    def lower(self, inputs: Inputs) -> bool:
        """Record that `inputs`, one of `parts`, does not fit; False if it is a single row."""
        if halved(inputs) is None:
            return False
        self._too_large.append((_positions(inputs), _pixels(inputs)))
        return True


def _positions(inputs: Inputs) -> int:
    """Positions of the larger pass over a micro-batch, if segments go through the model apart."""
    return max(each["input_ids"].numel() for each in (inputs, inputs.get(MISMATCHED, inputs)))


def _pixels(inputs: Inputs) -> int:
    """Numbers in the pixels of a micro-batch's images, as the processor makes them."""
    return sum(value.numel() for row in inputs.get(MEDIA, ()) for value in row.values())


def smaller(inputs: Inputs, share: int, *, by_tokens: bool) -> dict[str, int]:
    """The keys that make micro-batches at most half of `inputs`, of a rank's `share` of a step's rows.

    They set a number of tokens if micro-batches are divided `by_tokens`. There are none for a single row.
    """
    rows = row_count(inputs)
    if rows == 1:
        return {}
    if by_tokens:
        return {"training.micro_batch_tokens": _positions(inputs) // 2}
    return {"training.micro_batch": max(fewer for fewer in range(1, rows // 2 + 1) if share % fewer == 0)}


def named(lowered: dict[str, int]) -> str:
    """Those keys in a sentence."""
    return " and ".join(f"`{key}: {value}`" for key, value in lowered.items())


def settings(config: Config) -> str:
    """A hash of the settings other than the micro-batch that decide whether a step fits."""
    sections = ("model", "quantization", "adapter", "optimizer", "memory", "kernels", "distributed")
    values = config.model_dump(mode="json")
    training = {key: values["training"][key] for key in ("objective", "precision")}
    deciding = [ranks.world_size(), training, *(values[section] for section in sections)]
    return hashlib.sha256(json.dumps(deciding).encode()).hexdigest()


@dataclass(frozen=True)
class _Failure:
    """A micro-batch that did not fit, the rank that ran out of memory, and what its allocator said."""

    inputs: Inputs
    rank: int
    reason: str

    def named(self, step: Step) -> dict[str, int]:
        return {"rank": self.rank} if step.engine.world_size > 1 else {}


class Passes(Protocol):
    """The passes of a step over micro-batches; calls `begin` with each before its pass."""

    def __call__(self, micro_batches: list[Inputs], *, begin: Callable[[Inputs], object]) -> torch.Tensor: ...


class Report(Protocol):
    """Writes down what is done about memory that ran out, and tells the user.

    With several ranks, `split`, `recompute_more` and `give_up` are called on all of them, with `rank`, the one that ran
    out of memory.
    """

    def split(self, inputs: Inputs, **rank: int) -> None:
        """A micro-batch did not fit, and is split."""

    def recompute_more(self, inputs: Inputs, **rank: int) -> None:
        """A short micro-batch that recomputed less than the longest did not fit; none does from now on."""

    def give_up(self, error: BaseException, inputs: Inputs, **rank: int) -> None:
        """A single row does not fit; the run ends with `error`. All passes of the step are undone."""

    def not_repeatable(self, error: BaseException, inputs: Inputs) -> BaseException:
        """A micro-batch does not fit, in a step that cannot be repeated. Returns the error with which the run ends."""

    def updated_again(self) -> None:
        """An update did not fit, and is retried."""


@dataclass
class Retry:
    """Runs steps and updates, and retries them after running out of memory. `limit` persists from step to step."""

    report: Report
    limit: Limit = field(default_factory=Limit)

    def fitting_forward_backward(
        self, step: Step, micro_batches: list[Inputs], count: LossCount, number: int = 0
    ) -> torch.Tensor:
        """`Step.forward_backward` with retries, by all ranks alike. Raises for a single row, after `give_up`.

        What the objective needs the mean of is summed before, and by all ranks, as the loss of each depends on it.
        """
        start = StepStart(step)
        if step.objective.step_mean:
            sums = self._retried(step, start, micro_batches, step.sum_before, lambda: None)
            step.take_mean(ranks.summed(sums))
        passes = functools.partial(step.forward_backward, count=count, number=number)
        return self._retried(step, start, micro_batches, passes, step.catch_up)

    def _retried(
        self, step: Step, start: StepStart, micro_batches: list[Inputs], passes: Passes, catch_up: Callable[[], None]
    ) -> torch.Tensor:
        """Run `passes` until they fit on all ranks; `catch_up` takes part in the passes of other ranks."""
        while True:
            value, failure, error = self._attempt(step, micro_batches, passes)
            failures = _of_all_ranks(step, failure, error, catch_up)
            if not failures:
                return value
            start.restore()
            if row := self._make_smaller(step, failures):
                # `error` stays alive, with the frames of the failed pass, for an allocator's snapshot.
                shared = step.engine.world_size > 1
                ending = StepOutOfMemoryError(row.reason, on_all_ranks=True) if shared else error
                assert ending
                self.report.give_up(ending, row.inputs, **row.named(step))
                raise ending
            del error  # its frames hold memory of the failed pass
            release()

    def _attempt(
        self, step: Step, micro_batches: list[Inputs], passes: Passes
    ) -> tuple[torch.Tensor, _Failure | None, BaseException | None]:
        """Run the passes of a step; returns their value, and how they failed for lack of memory, if so."""
        begun: list[Inputs] = []  # memory may run out before the first one, and then none is split
        try:
            micro_batches = self.limit.parts(micro_batches)
            return passes(micro_batches, begin=begun.append), None, None
        except (MemoryError, RuntimeError) as error:
            # A failed collective cannot be repeated: its communicator is lost, and the other ranks wait in it.
            if not is_out_of_memory(error) or not begun or isinstance(error, DistError):
                raise
            if not step.engine.repeatable:
                ending = self.report.not_repeatable(error, begun[-1])
                if ending is error:
                    raise  # an error that is its own cause would send readers of causes in circles
                raise ending from error
            return torch.empty(0), _Failure(begun[-1], ranks.rank(), reason(error)), error

    def _make_smaller(self, step: Step, failures: list[_Failure]) -> _Failure | None:
        """Let the micro-batches of the next attempt take less memory; returns the failure of one that cannot."""
        for failure in failures:
            if step.levels and step.levels.level(tokens_a_row(failure.inputs)):  # short micro-batches recompute less
                step.levels.drop()
                self.report.recompute_more(failure.inputs, **failure.named(step))
                return None
        # The largest first, so that each other is at most at the limit that those before it set.
        for failure in sorted(failures, key=lambda failure: _positions(failure.inputs), reverse=True):
            if not self.limit.lower(failure.inputs):
                return failure
            self.report.split(failure.inputs, **failure.named(step))
        return None

    def update(self, step: Step) -> None:
        """`Step.update`; if memory runs out before anything was changed, free memory and retry once."""
        start = UpdateStart(step.engine.optimizer)
        try:
            step.update()
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not start.undo():
                error.add_note(
                    "The optimizer had updated some weights but not others, so this step cannot be retried; earlier "
                    "checkpoints are untouched."
                )
                raise
        release()
        self.report.updated_again()
        step.update()


def _of_all_ranks(
    step: Step, failure: _Failure | None, error: BaseException | None, catch_up: Callable[[], None]
) -> list[_Failure]:
    """The failures of all ranks in this step, in rank order; the same on each."""
    if step.engine.world_size == 1 or not step.engine.repeatable:
        return [failure] if failure else []
    if error:
        release(error)
        catch_up()
    if not int(ranks.summed(torch.tensor(int(failure is not None), device=step.device))):
        return []
    return [each for each in ranks.gathered(failure) if each]


class StepStart:
    """The state at the start of a step: its random state. Gradients were None, and weights have not changed since."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._random = RandomState()

    def restore(self) -> None:
        """Undo all forward and backward passes since."""
        self._step.model.zero_grad(set_to_none=True)
        self._random.restore()


def release(error: BaseException | None = None) -> None:
    """Free the memory of a failed pass: what its frames hold, if `error` is still needed, and caches."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    libraries.return_freed_memory()


class UpdateStart:
    """The state at the start of an update, to tell after a failure whether any weight or optimizer state was changed.

    Optimizers update tensor by tensor, and a partial update cannot be undone without a copy of everything, but it can
    be detected: torch counts in-place changes of each tensor; bitsandbytes' kernels bypass that counter, but increment
    the step count in a tensor's state before updating it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = {weight: _changes(weight) for weight in optimizer_states.parameters(optimizer)}
        self._states = {weight: _marks(state) for weight, state in optimizer.state.items()}

    def undo(self) -> bool:
        """Remove states that were created since; return whether everything is then as it was."""
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


def _marks(state: dict[str, Any]) -> dict[str, Any]:
    """A value for each entry of a weight's state that differs after the entry was changed."""
    return {
        name: (id(value), _changes(value)) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def _changes(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001 -- autograd's counter, which has no public name


def location_of(rows: Any, inputs: Inputs) -> str:
    """The location of a single-row micro-batch, found by its tokens in the data set `rows`.

    Of segments that go through the model apart, a micro-batch may have one alone, or the longer one twice.
    """
    own = first_row(inputs)
    lengths = rows["segments"][:] if "segments" in rows.column_names else ([length] for length in rows["length"][:])
    for number, each in enumerate(lengths):
        if {len(ids) for ids in own} <= set(each):
            row = rows[number]
            segments = [segment.input_ids for segment in segments_of(row)]
            if all(ids in segments for ids in own):
                return str(row["place"])
    return "a row that is not in the data set"
