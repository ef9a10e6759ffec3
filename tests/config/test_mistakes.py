"""Facts about what people are told of their mistakes: each message names its cure, and is short."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mistakes
import pytest


@pytest.fixture(scope="module")
def told() -> list[tuple[mistakes.Mistake, str]]:
    return mistakes.told()


def test_each_of_sixty_mistakes_is_told_with_its_cure_and_in_few_words(
    told: list[tuple[mistakes.Mistake, str]], subtests: pytest.Subtests
) -> None:
    assert len(told) >= 60
    for mistake, said in told:
        with subtests.test(mistake=mistake.shown):
            assert mistake.cure in said
            assert len(said) <= mistakes.LONGEST


def test_the_mistakes_are_those_of_four_tools_and_of_people() -> None:
    counted = Counter(mistake.source for mistake in mistakes.MISTAKES)
    assert set(counted) == {"Axolotl", "LLaMA-Factory", "Unsloth", "TRL", "misspelt", "value", "data"}
    assert min(counted.values()) >= 6


def test_the_page_is_what_is_said_today(told: list[tuple[mistakes.Mistake, str]]) -> None:
    assert (Path(__file__).parent / "mistakes.md").read_text(encoding="utf-8") == mistakes.page(told), (
        "make it again: python benchmarks/mistakes.py > tests/config/mistakes.md"
    )
