"""What is said of other versions of the libraries: what moved, by how much, and nothing of what did not."""

from __future__ import annotations

from typing import Any

import versions

PATCH = {"signature": "(tensor)", "source": "def f(tensor): ..."}
STEPS = {"steps": [[2.0, 1.0], [4.0, 1.0]], "evaluations": [3.0], "weights": "a"}


def facts(**changes: Any) -> dict[str, Any]:
    found = {
        "python": "3.11.7", "packages": {"torch": "2.13.0", "gguf": None},
        "patches": {"ONE": PATCH, "OTHER": PATCH}, "trajectories": {"packed": STEPS, "int8": STEPS},
        "forecasts": {"7B": {"needed_bytes": 5, "phases": {"forward": 3}}},
    }  # fmt: skip
    return {
        key: {**value, **changes.get(key, {})} if isinstance(value, dict) else value for key, value in found.items()
    }


def test_nothing_is_listed_of_equal_versions() -> None:
    found = versions.compared(facts(), facts())
    assert (found["patches"], found["trajectories"], found["forecasts"]) == ({}, {}, {})
    assert "patches: 2 of 2 as before" in versions.page(found)


def test_what_moved_is_named_with_its_size() -> None:
    other = facts(
        patches={"ONE": {**PATCH, "signature": "(tensor, out)"}, "OTHER": {"signature": "gone", "source": "?"}},
        trajectories={"packed": {**STEPS, "steps": [[2.0, 1.0], [4.004, 1.0]]}, "int8": {"fails": "ValueError: no"}},
        forecasts={"7B": {"needed_bytes": 6, "phases": {"forward": 3}}},
    )
    page = versions.page(versions.compared(facts(), other))
    for line in (
        "## Python 3.11.7, torch 2.13.0\n", "patches: 0 of 2 as before", "`ONE`: the signature is (tensor, out)",
        "`OTHER`: gone", "`packed`: from step 2, by 1.0e-03 at most", "`int8`: fails: ValueError: no",
        "`7B`: needed_bytes 5 -> 6",
    ):  # fmt: skip
        assert line in page


def test_a_changed_source_and_changed_weights_are_told_apart_from_signatures_and_steps() -> None:
    other = facts(
        patches={"ONE": {**PATCH, "source": "def f(tensor): 1"}}, trajectories={"int8": {**STEPS, "weights": "b"}}
    )
    found = versions.compared(facts(), other)
    assert found["patches"] == {"ONE": "the source changed"}
    assert found["trajectories"] == {"int8": "the weights or evaluations alone"}
