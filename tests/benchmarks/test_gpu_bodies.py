"""The bodies of the GPU tests, as far as a CPU runs them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_bodies_of_gpu_tests_run_as_far_as_the_list_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tests/gpu/on_cpu.py` writes the list anew."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    on_cpu = importlib.import_module("on_cpu")
    outcomes = on_cpu.run_all()
    assert not [name for name, outcome in outcomes.items() if outcome.startswith("FAILED")]
    assert outcomes == json.loads(on_cpu.LIST.read_text())


BODIES = """
import torch

def right(size):
    assert size == 1
    assert torch.cuda.memory_allocated() == -1
    assert {}["allocated_bytes"] == size

def half(size):
    assert size == 1
    raise RuntimeError("no card")
    assert size == 2

def true(size):
    assert size == 2

def wrong_name(size):
    assert size == 1
    assert sizes == 2

def wrong_argument(size):
    torch.cuda.synchronize(devise=0)

def wrong_attribute(size):
    assert torch.cuda.max_memory_alocated() > 0
"""


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("right", "to its end; 3 of 3 assertions reached, which lack what a card gives (KeyError 'allocated_bytes')"),
        ("half", 'up to `raise RuntimeError("no card")`: RuntimeError; 1 of 2 assertions reached'),
        ("true", "to its end; 1 of 1 assertions reached"),
        ("wrong_name", NameError),
        ("wrong_argument", TypeError),
        ("wrong_attribute", AttributeError),
    ],
)
def test_on_a_cpu_no_test_of_a_card_passes_and_a_wrong_name_fails(
    name: str, outcome: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_test_bodies.py").write_text(BODIES)
    for folder in (tmp_path, ROOT / "tests" / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "gpu_test_bodies", raising=False)
    on_cpu, bodies = importlib.import_module("on_cpu"), importlib.import_module("gpu_test_bodies")
    on_cpu.stand_in(monkeypatch)
    # A skip is no Exception, so that nothing of the body takes it for one.
    with pytest.raises((Exception, pytest.skip.Exception)) as ended:
        on_cpu.run_body(getattr(bodies, name), {"size": 2})
    if isinstance(outcome, str):
        assert isinstance(ended.value, pytest.skip.Exception)
        assert str(ended.value) == f"ran on a CPU {outcome}"
    else:
        assert ended.type is outcome
