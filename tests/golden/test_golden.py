"""No number has moved: trajectories and forecasts are what they were when they were recorded (golden_jobs.py)."""

import json
from pathlib import Path

import pytest
from golden_jobs import FORECASTS, JOBS, PLANS, RESUMED, TRAJECTORIES, differences, machine, plan, trajectory

_PINNED = json.loads(TRAJECTORIES.read_text())
_FORECASTS = json.loads(FORECASTS.read_text())
# Another processor or library rounds elsewhere; then the course is the same and its last bits are not.
_SAME_MACHINE = _PINNED["machine"] == machine()
_SAME_VERSIONS = _FORECASTS["machine"] | {"cpu": None} == machine() | {"cpu": None}
_ELSEWHERE = 1e-2


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", [*JOBS, RESUMED])
def test_a_trajectory_is_what_it_was(name, tmp_path: Path):
    pinned, found = dict(_PINNED["trajectories"][name]), trajectory(name, tmp_path)
    if not _SAME_MACHINE:
        del pinned["weights"], found["weights"]
    assert not list(differences(pinned, found, 0 if _SAME_MACHINE else _ELSEWHERE))


@pytest.mark.parametrize("name", PLANS)
def test_a_forecast_is_what_it_was(name):
    found = json.loads(json.dumps(plan(name)))
    assert not list(differences(_FORECASTS["forecasts"][name], found, 0 if _SAME_VERSIONS else _ELSEWHERE))


def test_every_pinned_number_is_asked_for():
    assert list(_PINNED["trajectories"]) == [*JOBS, RESUMED]
    assert list(_FORECASTS["forecasts"]) == list(PLANS)


def test_a_number_that_moved_is_named():
    pinned = {"steps": [[1.0, 2.0], [3.0, 4.0]], "weights": "a"}
    moved = {"steps": [[1.0, 2.0], [3.0, 4.0000001]], "weights": "b"}
    assert list(differences(pinned, moved, 0)) == [
        ".steps[1][1]: 4.0 is now 4.0000001",
        ".weights: 'a' is now 'b'",
    ]
    assert list(differences(pinned, moved, 1e-3)) == [".weights: 'a' is now 'b'"]
    assert not list(differences(pinned, pinned, 0))
