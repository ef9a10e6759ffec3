"""Facts about what people are told of their mistakes: each message names its cure, and is short."""

from __future__ import annotations

from collections import Counter

import mistakes
import pytest


@pytest.fixture(scope="module")
def told() -> list[mistakes.Mistake]:
    return mistakes.told(mistakes.read())


@pytest.mark.slow
def test_the_message_on_each_of_sixty_mistakes_is_short_and_has_a_cure(
    told: list[mistakes.Mistake], subtests: pytest.Subtests
) -> None:
    counted = Counter(mistake.source for mistake in told)
    assert set(counted) == {"Axolotl", "LLaMA-Factory", "Unsloth", "TRL", "misspelt", "value", "data"}
    assert min(counted.values()) >= 6
    assert len(told) >= 60
    for mistake in told:
        with subtests.test(mistake=mistake.written):
            assert mistake.cure
            assert mistake.cure in mistake.said
            assert len(mistake.said) <= mistakes.LONGEST


def test_the_table_has_what_is_said_today(told: list[mistakes.Mistake]) -> None:
    # Python's words on JSON are quoted, and 3.13 has others.
    read, ours = ([one for one in table if one.cure != "not valid JSON"] for table in (mistakes.read(), told))
    assert len(ours) == len(told) - 1
    assert read == ours, "write it anew: .venv/bin/python tests/config/mistakes.py"
