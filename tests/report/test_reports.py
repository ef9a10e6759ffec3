"""Reports of a run are what extras add: the core writes none."""

from __future__ import annotations

import pytest

from finetune.report import reports
from finetune.storage.rundir import RunDirectory


def test_a_run_has_a_page_by_its_extra_and_none_without(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(reports, "WRITERS", [])
        reports.write(run, end=True)
    assert not run.report_file.exists()
    reports.write(run)
    assert run.report_file.exists()
    assert not run.plot_file.exists()
