"""Steps that are made ahead are the steps that would have been made."""

import threading
from collections.abc import Iterator

import pytest

from finetune.training.batches import one_ahead
from finetune.training.collator import Inputs


def steps(made: list[int], ahead: threading.Event) -> Iterator[list[Inputs]]:
    for number in range(4):
        made.append(number)
        if number == 1:
            ahead.set()
        yield [{"number": number}]
    raise RuntimeError("a row that cannot be collated")


def test_each_step_is_made_while_the_one_before_is_used_and_an_error_comes_in_its_place() -> None:
    made: list[int] = []
    ahead = threading.Event()
    found = one_ahead(steps(made, ahead))
    assert next(found) == [{"number": 0}]
    assert ahead.wait(10)  # the second is made with the first one still in use
    assert made[:2] == [0, 1]
    assert [step[0]["number"] for step in (next(found), next(found), next(found))] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="cannot be collated"):
        next(found)


def test_it_ends_where_the_steps_end() -> None:
    assert list(one_ahead(iter([[], [{"number": 1}]]))) == [[], [{"number": 1}]]
