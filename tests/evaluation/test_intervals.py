"""Confidence intervals: a bootstrap over rows that is the same on each call, and pairs the models."""

import json

import numpy as np
import pytest

from finetune.evaluation.intervals import Measured, compared


def test_an_interval_of_means_is_about_that_of_the_normal_distribution() -> None:
    scores = np.random.default_rng(1).normal(0.6, 0.2, 400)
    found = compared({"base": Measured.mean(list(scores))})["base"]
    error = scores.std() / 20
    assert found["value"] == pytest.approx(scores.mean())
    assert found["low"] == pytest.approx(scores.mean() - 1.96 * error, abs=error / 4)
    assert found["high"] == pytest.approx(scores.mean() + 1.96 * error, abs=error / 4)


def test_a_quotient_of_totals_weighs_rows_by_their_counts() -> None:
    rows = np.array([[1.0, 1.0], [30.0, 10.0]] * 50)
    found = compared({"base": Measured(31 / 11, rows)}, np.exp)["base"]
    assert found["value"] == pytest.approx(np.exp(31 / 11))
    assert np.exp(2.5) < found["low"] < found["value"] < found["high"] < np.exp(3)


def test_a_difference_is_paired_by_row() -> None:
    """Rows differ much from one another and each is a little better: unpaired intervals would overlap."""
    base = np.random.default_rng(2).uniform(0, 1, 200)
    found = compared({"base": Measured.mean(list(base)), "adapter": Measured.mean(list(base + 0.01))})
    assert found["adapter"]["low"] < found["base"]["high"]
    difference = found["adapter"]["difference"]
    assert difference == {name: pytest.approx(0.01) for name in ("value", "low", "high")}
    assert "difference" not in found["base"]
    again = compared({"base": Measured.mean(list(base)), "adapter": Measured.mean(list(base + 0.01))})
    assert again == found


def test_a_mean_over_a_rare_kind_of_rows_has_the_interval_of_those_rows_alone() -> None:
    """Among 100 answers there are three of the kind: one draw in twenty has none of them."""
    values = {name: np.array([[low, 1.0], [0.5, 1.0], [0.8, 1.0]]) for name, low in (("base", 0.1), ("adapter", 0.2))}
    found, expected = (
        compared({name: Measured(rows[:, 0].mean(), np.vstack([rows, others])) for name, rows in values.items()})
        for others in (np.zeros((97, 2)), np.zeros((0, 2)))
    )
    assert found == expected
    assert found["base"]["low"] < found["base"]["value"] < found["base"]["high"]
    assert found["adapter"]["difference"]["low"] == 0
    one = compared({"base": Measured(0.5, np.array([[0.5, 1.0], [0.0, 0.0]]))})["base"]
    assert one == {"value": 0.5, "low": None, "high": None}


def test_unknown_bounds_are_none(subtests: pytest.Subtests) -> None:
    for name, models, expected in [
        ("a single row", {"a": Measured.mean([1.0])}, {"value": 1.0, "low": None, "high": None}),
        ("no rows", {"a": Measured(2.0)}, {"value": 2.0, "low": None, "high": None}),
        ("an infinite value", {"a": Measured(1e3)}, {"value": None, "low": None, "high": None}),
    ]:
        with subtests.test(name=name):
            [found] = compared(models, np.exp if name == "an infinite value" else lambda values: values).values()
            assert found == pytest.approx(expected)
            json.dumps(found, allow_nan=False)
    found = compared({"a": Measured(1.0, error=0.1), "b": Measured(1.5, error=0.1)})
    assert found["b"] == {
        "value": 1.5, "low": pytest.approx(1.304, abs=1e-4), "high": pytest.approx(1.696, abs=1e-4),
        "difference": {"value": 0.5, "low": None, "high": None},
    }  # fmt: skip
