"""The bodies of the GPU tests, as far as a CPU runs them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from children import Children

LIST = Path(__file__).resolve().parents[1] / "gpu" / "on_cpu.json"


def run_all() -> dict[str, str]:
    sys.path.insert(0, str(LIST.parent))
    outcomes: dict[str, str] = importlib.import_module("on_cpu").run_all()
    return outcomes


@pytest.mark.long
def test_the_bodies_of_gpu_tests_run_as_far_as_the_list_says(children: Children) -> None:
    """`python tests/gpu/on_cpu.py` writes the list anew."""
    [outcomes] = children.call(run_all)
    assert not [name for name, outcome in outcomes.items() if outcome.startswith("FAILED")]
    assert outcomes == json.loads(LIST.read_text())
