"""Facts about collecting problems: all are reported together, each once, in order, and no more than a page of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from messages import refusal

from finetune.data.problems import LIMIT, BadRows, Problems
from finetune.errors import DataError, MachineError


def block(*found: str | Exception) -> None:
    """A block that adds each text and raises each exception."""
    with Problems() as problems:
        for one in found:
            if isinstance(one, Exception):
                raise one
            problems.add(one)


def collected(*found: str | Exception) -> list[str]:
    """The lines of the error that such a block ends with."""
    with pytest.raises(DataError) as caught:
        block(*found)
    assert caught.value.exit_code == 3
    return str(caught.value).splitlines()


def test_all_problems_are_reported_in_their_order_and_each_once() -> None:
    block()
    assert collected("a:1: x", "a:2: y", "a:1: x") == ["a:1: x", "a:2: y"]
    assert collected("a:1: x", DataError("a: cut off")) == ["a:1: x", "a: cut off"]
    assert collected("a:1: x", BadRows(["a:1: x", "a:2: y"])) == ["a:1: x", "a:2: y"]
    # Rows of a file that fail alike share a line.
    found = ["a:1: x", "a:2: y", "b:1: x", "a:3: x", "a:4: x", "a:5: x", "a:9: x", "a: whole"]
    assert collected(*found) == ["a:1, 3 to 5, 9: x", "a:2: y", "b:1: x", "a: whole"]
    with refusal(MachineError, "no network"):
        block("a:1: x", MachineError("no network"))


def test_a_page_of_problems_ends_the_block_at_once() -> None:
    problems = Problems()
    for line in range(1, LIMIT):
        problems.add(f"a:{line}: x{line}")
    with pytest.raises(BadRows) as caught:
        problems.add("the last straw")
    lines = str(caught.value).splitlines()
    assert lines[: LIMIT - 1] == [f"a:{line}: x{line}" for line in range(1, LIMIT)]
    assert lines[LIMIT - 1 :] == ["the last straw", f"Reading stopped after {LIMIT} problems; there may be more."]


def test_problems_are_raised_after_every_item() -> None:
    problems = Problems()

    def items() -> Iterator[int]:
        for number in range(5):
            if number == 2:
                problems.add("the third is wrong")
            else:
                yield number

    seen: list[int] = []
    with pytest.raises(BadRows, match="the third is wrong"), problems:
        seen.extend(items())
    assert seen == [0, 1, 3, 4]


def test_a_generator_that_is_given_up_raises_no_problems() -> None:
    problems = Problems()

    def items() -> Generator[int]:
        with problems:
            yield from (1, 2)

    reading = items()
    next(reading)
    problems.add("something")
    reading.close()
