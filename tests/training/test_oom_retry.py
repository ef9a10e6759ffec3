"""Steps that cannot be repeated, and what can be undone of an update that memory ran out in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset

from finetune.data.batching import MicroBatching
from finetune.data.encoded import IGNORE, MEDIA
from finetune.objectives import OBJECTIVES
from finetune.objectives.kto import LABELLED
from finetune.training.collator import Inputs, StepCollator, apart
from finetune.training.largest_batch import in_both_passes, longer_segment
from finetune.training.oom_retry import Limit, Retry, UpdateStart, location_of

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
    """Whoever follows the causes of an error, as `start.releasing` does, would never arrive."""

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
        Retry(report).fitting_forward_backward(step, [{"input_ids": torch.zeros(1, 2)}], 1)
    assert caught.value.__cause__ is None


def answer(first: int, length: int, mismatched: int) -> dict[str, Any]:
    """A row of an answer of this length and a mismatched one, whose tokens count up from `first`."""
    ids = [*range(first, first + length), *range(first + 50, first + 50 + mismatched)]
    row = {"input_ids": ids, "labels": [IGNORE, *ids[1:]], "segments": [length, mismatched], "shared": 0}
    return {**row, "length": len(ids), "desirable": 1.0, "place": f"row {first}"}


@pytest.mark.parametrize("packed", [False, True])
def test_the_row_that_does_not_fit_is_named_whichever_of_its_passes_it_was(packed: bool) -> None:
    rows = Dataset.from_list([answer(100, 5, 7), answer(200, 7, 5), answer(300, 5, 7)])
    collate = StepCollator(MicroBatching(1, 100, packed, LABELLED), 0)
    for row in rows:
        whole, warm_up = (collate.micro_batch([each]) for each in (row, in_both_passes(longer_segment(row))))
        assert [location_of(rows, each) for each in (whole, apart(whole), warm_up)] == [row["place"]] * 3
    other = collate.micro_batch([answer(400, 5, 7)])
    assert location_of(rows, other) == "a row that is not in the data set"


def test_a_mismatched_answer_that_does_not_fit_leaves_smaller_micro_batches_whole() -> None:
    collate, limit = StepCollator(MicroBatching(2, layout=LABELLED), 0), Limit()
    long, short = (collate.micro_batch([answer(at, *lengths) for at in (100, 200)]) for lengths in ((4, 40), (8, 8)))
    assert limit.lower(long)
    assert [len(limit.parts([each])) for each in (long, short)] == [2, 1]


def test_images_that_do_not_fit_leave_micro_batches_of_fewer_pixels_whole() -> None:
    collate, limit = StepCollator(MicroBatching(2), 0), Limit()

    def shown(tokens: int, *pixels: int) -> Inputs:
        rows = [{"input_ids": [1] * tokens, "labels": [1] * tokens}] * 2
        return {**collate.micro_batch(rows), MEDIA: [{"pixel_values": torch.ones(each, 4)} for each in pixels]}

    assert limit.lower(shown(8, 30, 50))
    for inputs, parts in ((shown(8, 50, 30), 2), (shown(9, 80, 1), 2), (shown(9, 40, 30), 1), (shown(7, 80, 80), 1)):
        assert len(limit.parts([inputs])) == parts
    assert limit.lower(shown(90, 0, 0))
    assert [len(limit.parts([shown(*sizes)])) for sizes in ((90, 0, 0), (89, 0, 0))] == [2, 1]


def test_an_update_that_did_nothing_leaves_the_states_where_they_are_and_one_change_cannot_be_undone(
    adam: torch.optim.Optimizer, weights: Weights
) -> None:
    assert UpdateStart(adam).undo() is True
    assert set(adam.state) == set(weights)
    for tensor in (weights[0], adam.state[weights[0]]["exp_avg"], adam.state[weights[0]]["step"]):
        start = UpdateStart(adam)
        with torch.no_grad():
            tensor.add_(1)
        assert start.undo() is False


def test_states_that_were_made_and_not_used_are_removed(weights: Weights) -> None:
    for made in ({}, {"step": 0}, {"step": torch.tensor(0.0), "exp_avg": torch.zeros(2)}):
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
