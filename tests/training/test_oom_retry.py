"""Steps that cannot be repeated, and what can be undone of an update that memory ran out in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from finetune.objectives import OBJECTIVES
from finetune.training.oom_retry import Retry, UpdateStart

Weights = list[torch.nn.Parameter]


@pytest.fixture
def weights() -> Weights:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]


@pytest.fixture
def adam(weights: Weights) -> torch.optim.Optimizer:
    """After its first step, with states of both weights."""
    optimizer = torch.optim.Adam(weights)
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_the_error_of_a_step_that_cannot_be_repeated_is_not_its_own_cause() -> None:
    """Whoever follows the causes of an error, as `session.releasing` does, would never arrive."""

    def run_out(parts: list[Any], count: int, number: int, begin: Any) -> None:
        begin(parts[0])
        raise torch.OutOfMemoryError("no room")

    step: Any = SimpleNamespace(
        forward_backward=run_out, engine=SimpleNamespace(repeatable=False, world_size=2), model=torch.nn.Module(),
        objective=OBJECTIVES["supervised"], catch_up=None,
    )  # fmt: skip
    report = Mock()
    report.not_repeatable.side_effect = lambda error, inputs: error
    with pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
        Retry(report).forward_backward(step, [{"input_ids": torch.zeros(1, 2)}], 1)
    assert caught.value.__cause__ is None


def test_an_update_that_did_nothing_leaves_the_states_where_they_are(
    adam: torch.optim.Optimizer, weights: Weights
) -> None:
    start = UpdateStart(adam)
    assert start.undo() is True
    assert set(adam.state) == set(weights)


def test_one_weight_that_changed_cannot_be_undone(weights: Weights) -> None:
    start = UpdateStart(torch.optim.SGD(weights, lr=0.1))
    with torch.no_grad():
        weights[0].add_(1)
    assert start.undo() is False


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_one_state_that_changed_cannot_be_undone(adam: torch.optim.Optimizer, weights: Weights, name: str) -> None:
    start = UpdateStart(adam)
    adam.state[weights[0]][name].add_(1)
    assert start.undo() is False


@pytest.mark.parametrize("made", [{}, {"step": 0}, {"step": torch.tensor(0.0), "exp_avg": torch.zeros(2)}])
def test_states_that_were_made_and_not_used_are_removed(weights: Weights, made: dict[str, object]) -> None:
    optimizer = torch.optim.Adam(weights)
    start = UpdateStart(optimizer)
    optimizer.state[weights[0]] = made
    assert start.undo() is True
    assert not optimizer.state


def test_a_new_state_that_has_counted_a_step_cannot_be_undone_and_stays(weights: Weights) -> None:
    """A kernel writes weights past torch's count of changes; the step of its state is counted before."""
    optimizer = torch.optim.Adam(weights)
    start = UpdateStart(optimizer)
    optimizer.state[weights[0]], optimizer.state[weights[1]] = {"step": 1}, {"step": 0}
    assert start.undo() is False
    assert set(optimizer.state) == set(weights)
