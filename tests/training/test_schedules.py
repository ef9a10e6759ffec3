"""Each schedule: its warm-up begins above 0, its curve is transformers', and no step is at 0."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from finetune.config import TrainingSection
from finetune.training.schedules import SCHEDULES, rate, scheduler, warmup_steps

PEAK = 1e-3
THEIRS = {
    "cosine": ("cosine", None), "cosine_to_tenth": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "linear": ("linear", None), "constant": ("constant_with_warmup", None), "inverse_sqrt": ("inverse_sqrt", None),
    "polynomial": ("polynomial", None),
}  # fmt: skip


def section(**values: object) -> TrainingSection:
    return TrainingSection(learning_rate=PEAK, **values)


def course(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """The rates of as many steps."""
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


assert THEIRS.keys() == SCHEDULES.keys(), "each schedule is compared"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_after_warm_up_the_rates_are_those_of_transformers(name: str, warmup: int) -> None:
    steps = 11
    ours = course(scheduler(section(schedule=name, warmup=warmup), optimizer(), steps), steps)
    theirs_name, arguments = THEIRS[name]
    theirs = course(get_scheduler(theirs_name, optimizer(), warmup, steps, arguments), steps)
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
    assert ours[:warmup] == pytest.approx([PEAK * step / warmup for step in range(1, warmup + 1)])
    assert ours == [rate(section(schedule=name, warmup=warmup), step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(("warmup", "steps"), [(0.0, 0), (0.03, 1), (0.25, 3), (1.0, 1), (4.0, 4), (30.0, 30)])
def test_a_share_of_ten_steps_is_rounded_up_and_a_number_is_taken(warmup: float, steps: int) -> None:
    assert warmup_steps(section(warmup=warmup), 10) == steps


@given(
    name=st.sampled_from(sorted(SCHEDULES)), steps=st.integers(1, 500), learning_rate=st.floats(1e-12, 10),
    warmup=st.floats(0, 1, exclude_max=True) | st.integers(1, 600),
)  # fmt: skip
def test_every_step_has_a_rate_above_0_and_none_above_the_peak(
    name: str, steps: int, learning_rate: float, warmup: float
) -> None:
    training = TrainingSection(learning_rate=learning_rate, schedule=name, warmup=warmup)
    rates = [rate(training, step, steps) for step in range(1, steps + 1)]
    assert min(rates) > 0
    assert max(rates) <= learning_rate * (1 + 1e-12)
    if warmup_steps(training, steps) <= steps:
        assert max(rates) == pytest.approx(learning_rate)
