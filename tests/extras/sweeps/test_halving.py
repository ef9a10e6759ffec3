"""Half of the settings are stopped where their losses tell them apart, and no winner is called where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.extras.sweeps import halving


def scores(**means: float) -> dict[str, np.ndarray]:
    """Settings of one seed with these mean losses on 200 rows of uneven difficulty, which all find equally hard."""
    generator = np.random.default_rng(0)
    hard = generator.normal(0, 0.5, 200)
    made = {}
    for name, mean in means.items():
        noise = generator.normal(0, 0.02, 200)
        made[name] = np.dstack([10 * (mean + hard - hard.mean() + noise - noise.mean()), np.full(200, 10.0)])
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


def test_none_of_two_that_did_not_diverge_is_stopped() -> None:
    assert halving.stopped(scores(a=2.0, b=2.1)) == {}


def test_a_winner_is_alone_and_a_tie_names_all() -> None:
    assert halving.tied(scores(a=2.1, b=2.0, c=2.3)) == ["b"]
    assert halving.tied(scores(a=2.0, b=2.0004, c=2.3)) == ["a", "b"]


@pytest.mark.parametrize(("rows", "winners"), [(1, ["b", "a"]), (5, ["b", "a"]), (6, ["b"])])
def test_few_rows_call_no_winner_though_all_speak_for_one_and_stop_no_setting(rows: int, winners: list[str]) -> None:
    known = {name: score[:, :rows] for name, score in scores(a=2.1, b=2.0).items()}
    assert halving.tied(known) == winners
    assert bool(halving.stopped({**known, "c": known["a"] + [0.01, 0]})) == (len(winners) == 1)


def test_what_a_seed_changes_as_much_as_the_setting_calls_no_winner() -> None:
    """On the rows alone, each seed by itself would call one: the first two one setting, the last the other."""
    seeds = [scores(a=2.0, b=2.03), scores(a=2.0, b=2.02), scores(a=2.0, b=1.985)]
    assert [halving.tied(each) for each in seeds] == [["a"], ["a"], ["b"]]
    together = {name: np.concatenate([each[name] for each in seeds]) for name in "ab"}
    assert halving.tied(together) == ["a", "b"]


def test_the_interval_over_seeds_is_students_beside_that_over_rows() -> None:
    differences = [0.03, 0.02, 0.01]
    seeds = [scores(a=2.0, b=2.0 + each) for each in differences]
    together = {name: np.concatenate([each[name] for each in seeds]) for name in "ab"}
    found = halving.differences(together, "a")["b"]
    summed = {name: each.sum(axis=0, keepdims=True) for name, each in together.items()}
    rows = halving.differences(summed, "a")["b"]
    of_seeds = 4.303 * np.std(differences, ddof=1) / np.sqrt(3)
    assert found["value"] == pytest.approx(0.02)
    assert found["value"] - found["low"] == pytest.approx(np.hypot(rows["value"] - rows["low"], of_seeds))
    assert found["high"] - found["value"] == pytest.approx(np.hypot(rows["high"] - rows["value"], of_seeds))


def test_what_diverged_is_last_and_never_wins() -> None:
    diverged = {"a": np.full((1, 1, 2), np.inf)}
    assert halving.ranked({**diverged, **scores(b=9.0)}) == ["b", "a"]
    assert halving.tied({**diverged, **scores(b=9.0)}) == ["b"]
    assert halving.tied(diverged) == []
