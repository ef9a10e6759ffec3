"""A training loop that is ready for its first step, its steps by hand, and memory that runs out in them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.config import Config
from finetune.model.recompute import checkpointing
from finetune.objectives import supervised
from finetune.storage.rundir import RunDirectory
from finetune.training import run as training
from finetune.training import sample_answers
from finetune.training.collator import Inputs
from finetune.training.loop import Loop
from finetune.training.recorder import StepCounts


class _Ready(Exception):
    pass


def ready(config: Config) -> Loop:
    """The loop of a run as it stands before the first step, without a warm-up; its adapter's update is not zero."""

    def stop(self: Loop, resumed_from: Path | None) -> None:
        raise _Ready(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", stop)
        patch.setattr(training, "warm_up", lambda *given: {})  # leaves all as it was: test_largest_batch_first.py
        patch.setattr(sample_answers.SampleAnswers, "before", lambda *given: None)
        with pytest.raises(_Ready) as stopped:
            finetune.train(config)
    loop: Loop = stopped.value.args[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in loop.step.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02, generator=generator)
    loop.step.model.train()
    return loop


def before_each_step(patch: pytest.MonkeyPatch, act: Callable[[Loop], None]) -> None:
    """Let `act` see, or disturb, the loop as it stands before each step; `loop.progress.step` steps are done then."""

    def take_step(self: Loop, micro_batches_: list[Inputs]) -> bool:
        act(self)
        return plain(self, micro_batches_)

    plain = Loop.take_step
    patch.setattr(Loop, "take_step", take_step)


def stopped_and_resumed(config: Config, *steps: int) -> RunDirectory:
    """A run of `config` that was stopped after each of `steps`, and ended by the same command."""

    class Stopped(BaseException):
        pass

    def stop(step: int, loop: Loop) -> None:
        if loop.progress.step == step:
            raise Stopped

    for step in steps:
        with pytest.MonkeyPatch.context() as patch:
            before_each_step(patch, functools.partial(stop, step))
            with pytest.raises(Stopped):
                finetune.train(config)
    return finetune.train(config).run


def forecast_that_held(run: RunDirectory) -> dict[str, Any]:
    """The forecast of a run, each phase of which took what it says to a hundredth."""
    forecast: dict[str, Any] = json.loads(run.forecast_file.read_text())
    assert forecast["differences"]
    for difference in forecast["differences"]:
        assert abs(difference["relative"]) < 0.01, difference
    return forecast


def spoil_losses(patch: pytest.MonkeyPatch, *steps: int, gradients: bool = True) -> None:
    """Make the loss of these steps, from 1, NaN, and their gradients, unless those stay what they are."""

    def spoilt(model: Any, batch: Any) -> Any:
        total, count = supervised(model, batch)
        return total * math.nan if gradients else total + math.nan, count

    def act(loop: Loop) -> None:
        now = spoilt if loop.progress.step + 1 in steps else supervised
        loop.step = replace(loop.step, objective=replace(loop.step.objective, loss=now))

    before_each_step(patch, act)


def spoil_gradient(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make one number of one gradient infinite in these steps, from 1."""

    def act(loop: Loop) -> None:
        if loop.progress.step + 1 not in steps:
            return
        weight = next(weight for name, weight in loop.step.model.named_parameters() if "lora_B" in name)

        def infinite(gradient: torch.Tensor) -> torch.Tensor:
            hook.remove()
            gradient = gradient.clone()
            gradient.view(-1)[0] = math.inf
            return gradient

        hook = weight.register_hook(infinite)

    before_each_step(patch, act)


def micro_batches(loop: Loop, rows: Sequence[int], size: int) -> list[Inputs]:
    """Rows of the training data as micro-batches of `size` rows, which the config's own must not be smaller than."""
    chosen = [loop.steps.rows[row] for row in rows]
    return [part for at in range(0, len(chosen), size) for part in loop.steps.collate(chosen[at : at + size])]


def gradients(loop: Loop, inputs: list[Inputs], seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    torch.manual_seed(seed)
    model = loop.step.model
    model.zero_grad(set_to_none=True)
    counts = StepCounts.of(inputs, loop.step.objective)
    loss = loop.retry.fitting_forward_backward(loop.step, inputs, counts.trained)
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    model.zero_grad(set_to_none=True)
    return float(loss), found


def gradients_of_trainer(
    trainer: Any, loop: Loop, examples: list[dict[str, Any]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a trainer of TRL's with the trained weights of `loop`, for rows as it prepares them."""
    weights = {key: weight for key, weight in loop.step.model.named_parameters() if weight.requires_grad}
    trained = {key: weight for key, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert trained.keys() == weights.keys()
    with torch.no_grad():
        for key, weight in weights.items():
            trained[key].copy_(weight)
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(examples))
    loss.backward()
    return float(loss.detach()), {key: weight.grad for key, weight in trained.items()}


def assert_gradients_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float = 5e-6
) -> None:
    """Equal but for the order of sums in float32: to a few millionths of the largest gradient there is."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0, "without a gradient there is nothing to compare"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=within * largest)


@contextlib.contextmanager
def out_of_memory(loop: Loop, where: str, places: int) -> Iterator[list[int]]:
    """Out of memory in the last layer for micro-batches of more than `places`; the list has the places of each.

    `where`: in the `forward` pass, in the `backward` pass, or where that computes a checkpointed layer once more.
    """
    refused: list[int] = []

    def refuse(hidden: torch.Tensor) -> None:
        if hidden.shape[0] * hidden.shape[1] > places:
            refused.append(hidden.shape[0] * hidden.shape[1])
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    def before(module: Any, args: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward == (where == "recompute"):
            refuse(args[0])

    def after(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(refuse)

    layer = checkpointing.layers(loop.step.model)[-2]  # the last has gradients by then
    if where == "backward":
        hook = layer.register_forward_hook(after)
    else:
        # A hook on the layer itself would stay outside of its checkpoint.
        hook = layer.mlp.register_forward_pre_hook(before)
    try:
        yield refused
    finally:
        hook.remove()


def assert_split_with_the_same_mean(loop: Loop, whole: Inputs, where: str, within: float = 5e-6) -> None:
    """A micro-batch of which a third fits is split, and its loss and gradients stay the same."""
    loss, expected = gradients(loop, [whole])
    with out_of_memory(loop, where, whole["input_ids"].numel() // 3) as refused:
        other, found = gradients(loop, [whole])
    assert len(refused) >= 2
    assert loop.step.model.training
    assert other == pytest.approx(loss, rel=1e-6)
    assert_gradients_close(found, expected, within=within)
