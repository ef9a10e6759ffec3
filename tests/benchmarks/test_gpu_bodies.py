"""The bodies of the GPU tests, as far as a CPU runs them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

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
