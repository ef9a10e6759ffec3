"""Half of the settings are stopped where their losses tell them apart, and no winner is called where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.sweeps import halving


def scores(**means: float) -> dict[str, np.ndarray]:
    """Settings with these mean losses on 200 rows of uneven difficulty, which all find equally hard."""
    generator = np.random.default_rng(0)
    hard = generator.normal(0, 0.5, 200)
    made = {}
    for name, mean in means.items():
        noise = generator.normal(0, 0.02, 200)
        made[name] = np.column_stack([10 * (mean + hard - hard.mean() + noise - noise.mean()), np.full(200, 10.0)])
    return made


@pytest.mark.parametrize(
    ("settings", "shares"), [(1, []), (2, []), (3, [1 / 2]), (4, [1 / 4, 1 / 2]), (8, [1 / 8, 1 / 4, 1 / 2])]
)
def test_settings_are_halved_until_two_are_left(settings: int, shares: list[float]) -> None:
    assert halving.shares(settings) == shares


def test_the_worse_half_is_stopped_though_rows_differ_more_than_settings() -> None:
    stopped = halving.stopped(scores(a=2.0, b=2.1, c=2.05, d=2.2))
    assert set(stopped) == {"b", "d"}
    assert stopped["b"] == "its loss is 0.0500 above that of c"


def test_a_setting_that_cannot_be_told_from_the_better_half_goes_on() -> None:
    assert set(halving.stopped(scores(a=2.0, b=2.1, c=2.1005, d=2.2))) == {"d"}
    assert halving.stopped(scores(a=2.0)) == {}


def test_a_winner_is_alone_and_a_tie_names_all() -> None:
    assert halving.tied(scores(a=2.1, b=2.0, c=2.3)) == ["b"]
    assert halving.tied(scores(a=2.0, b=2.0004, c=2.3)) == ["a", "b"]


def test_what_diverged_is_last_and_never_wins() -> None:
    diverged = {"a": np.full((1, 2), np.inf)}
    assert halving.ranked({**diverged, **scores(b=9.0)}) == ["b", "a"]
    assert halving.tied({**diverged, **scores(b=9.0)}) == ["b"]
    assert halving.tied(diverged) == []
