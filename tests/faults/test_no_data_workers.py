"""No data worker can be killed or hang: rows are collated in the process that trains."""

from __future__ import annotations

import psutil
import pytest
from steps import before_each_step

import finetune


def test_rows_come_without_a_process_that_could_be_lost(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*psutil.Process().children()}  # of earlier tests: some may be at their end
    new: list[set[psutil.Process]] = []
    before_each_step(monkeypatch, lambda loop: new.append({*psutil.Process().children()} - before))
    assert finetune.train(quick()).run.finished
    assert new == [set()] * 4
