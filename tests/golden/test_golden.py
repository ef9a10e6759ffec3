"""No number has moved: trajectories and forecasts are what they were when they were recorded (golden_jobs.py)."""

import json
from pathlib import Path

import pytest
from golden_jobs import (
    FORECASTS,
    FUSED,
    FUSED_TRAJECTORIES,
    JOBS,
    PLANS,
    RESUMED,
    TRAJECTORIES,
    differences,
    fused_trajectory,
    machine,
    plan,
    trajectory,
)
from jobs import sampled

# What is pinned and not here is compared by the long tests.
OFTEN = (
    "nf4 without double quantization, packed", "int8 with dropout", "every weight trained", "AdEMAMix, rows split",
)  # fmt: skip
OFTEN_FUSED = ("another family, random weights",)
OFTEN_PLANNED = ("tiny, packed", "tiny, every weight", "tiny on a card, everything auto", "7B, fused")
_PINNED = json.loads(TRAJECTORIES.read_text())
_FUSED = json.loads(FUSED_TRAJECTORIES.read_text())
_FORECASTS = json.loads(FORECASTS.read_text())
# Another processor or library rounds elsewhere; then the course is the same and its last bits are not.
_SAME_VERSIONS = _FORECASTS["machine"] | {"cpu": None} == machine() | {"cpu": None}
_ELSEWHERE = 1e-2
_KERNELS = 1e-5
"""How far losses in float32 may be, relative, from those of PEFT's modules."""


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", sampled([*JOBS, RESUMED], *OFTEN))
def test_a_trajectory_is_what_it_was(name, tmp_path: Path):
    assert not _moved(_PINNED, name, trajectory(name, tmp_path))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", sampled(FUSED, *OFTEN_FUSED))
def test_a_trajectory_with_fused_kernels_is_what_it_was(name, tmp_path: Path):
    found = fused_trajectory(name, tmp_path) | {"plain_steps": _FUSED["trajectories"][name]["plain_steps"]}
    assert not _moved(_FUSED, name, found)


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_give_the_losses_of_plain_modules(name):
    job = _FUSED["trajectories"][name]
    fused, plain = ([loss for loss, _ in job[steps]] for steps in ("steps", "plain_steps"))
    assert job["steps"] != job["plain_steps"], "another program"
    assert not list(differences(plain, fused, _KERNELS))


def _moved(recorded, name, found):
    """The numbers of a trajectory that are not as recorded; weights are compared on the same processor alone."""
    same = recorded["machine"] == machine()
    pinned, found = dict(recorded["trajectories"][name]), dict(found)
    if not same:
        del pinned["weights"], found["weights"]
    return list(differences(pinned, found, 0 if same else _ELSEWHERE))


@pytest.mark.parametrize("name", sampled(PLANS, *OFTEN_PLANNED))
def test_a_forecast_is_what_it_was(name):
    found = json.loads(json.dumps(plan(name)))
    assert not list(differences(_FORECASTS["forecasts"][name], found, 0 if _SAME_VERSIONS else _ELSEWHERE))


def test_every_pinned_number_is_asked_for():
    assert list(_PINNED["trajectories"]) == [*JOBS, RESUMED]
    assert list(_FUSED["trajectories"]) == list(FUSED)
    assert list(_FORECASTS["forecasts"]) == list(PLANS)


def test_a_number_that_moved_is_named():
    pinned = {"steps": [[1.0, 2.0], [3.0, 4.0]], "weights": "a"}
    moved = {"steps": [[1.0, 2.0], [3.0, 4.0000001]], "weights": "b"}
    assert list(differences(pinned, moved, 0)) == [".steps[1][1]: 4.0 is now 4.0000001", ".weights: 'a' is now 'b'"]
    assert list(differences(pinned, moved, 1e-3)) == [".weights: 'a' is now 'b'"]
    assert not list(differences(pinned, pinned, 0))
