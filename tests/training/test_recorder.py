"""What a step is divided by and what is written of it: trained tokens, tokens, positions and means of statistics."""

import pytest
import torch

from finetune.data.batching import MicroBatching
from finetune.data.encoded import IGNORE
from finetune.objectives import OBJECTIVES
from finetune.runtime import ranks
from finetune.training.collator import Inputs, StepCollator
from finetune.training.recorder import StepCounts, StepNumbers

ROWS = [
    {"input_ids": [5] * 3, "labels": [5, IGNORE, 5]},  # the first token is predicted by none
    {"input_ids": [5] * 7, "labels": [IGNORE, 5, 5, 5, IGNORE, 5, 5]},
]
CPU = torch.device("cpu")


def counts(micro_batches: list[Inputs]) -> StepCounts:
    return StepCounts.of(micro_batches, OBJECTIVES["supervised"])


@pytest.mark.parametrize(
    ("way", "positions"), [(MicroBatching(2), 14), (MicroBatching(1), 10), (MicroBatching(1, 32, packed=True), 10)]
)
def test_a_step_counts_its_rows_in_whatever_micro_batches(way: MicroBatching, positions: int) -> None:
    assert counts(StepCollator(way, 0)(ROWS)) == StepCounts(trained=6, tokens=10, positions=positions)


def test_the_micro_batch_of_an_idle_rank_counts_nothing() -> None:
    second_rank = StepCollator(MicroBatching(1), 0, 1, 2)
    [theirs], [idle] = second_rank(ROWS), second_rank(ROWS[:1])
    assert counts([idle, theirs]) == StepCounts(trained=5, tokens=7, positions=7)


def test_the_counts_of_one_rank_never_go_to_the_device_and_a_step_that_trains_nothing_is_divided_by_1() -> None:
    assert StepCounts(0, 3, 4).of_all_ranks(CPU) == StepCounts(1, 3, 4)
    found = StepCounts(2, 3, 4).of_all_ranks(CPU)
    assert found == StepCounts(2, 3, 4)
    assert [type(value) for value in (found.trained, found.tokens, found.positions)] == [int, int, int]


def test_several_ranks_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "summed", lambda values: 2 * values)
    found = StepCounts(2, 3, 4).of_all_ranks(CPU)
    assert [int(value) for value in (found.trained, found.tokens, found.positions)] == [4, 6, 8]
    assert int(StepCounts(0, 3, 4).of_all_ranks(CPU).trained) == 1
    same_rows = StepCounts(2, 3, 4).of_all_ranks(CPU, context=2)
    assert [int(value) for value in (same_rows.trained, same_rows.tokens, same_rows.positions)] == [2, 3, 4]


@pytest.mark.parametrize(
    ("sums", "means"),
    [
        ({"kl": (3, 4), "other": (1, 0)}, {"kl": 0.75, "other": None}),
        (
            {"rewards_chosen": (6, 3), "rewards_rejected": (1, 4)},
            {"rewards_chosen": 2.0, "rewards_rejected": 0.25, "rewards_margins": 1.75},
        ),
        ({"rewards_chosen": (6, 3), "rewards_rejected": (0, 0)}, {"rewards_chosen": 2.0, "rewards_rejected": None}),
        ({"rewards_chosen": (0, 0), "rewards_rejected": (1, 4)}, {"rewards_chosen": None, "rewards_rejected": 0.25}),
    ],
)
def test_statistics_are_means_and_rewards_of_both_sides_have_a_margin(
    sums: dict[str, tuple[int, int]], means: dict[str, float | None]
) -> None:
    statistics = {name: (torch.tensor(total), torch.tensor(count)) for name, (total, count) in sums.items()}
    found = StepNumbers.read(torch.tensor(0.5), torch.tensor(2.0), StepCounts(6, 10, 14), statistics)
    assert found == StepNumbers(0.5, 2.0, 10, 14, means)
