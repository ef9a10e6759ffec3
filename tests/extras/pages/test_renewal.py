"""The report is renewed while a run goes on, and what goes wrong with that is not the run's matter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from finetune.extras.pages import renewal
from finetune.extras.pages.renewal import Renewal
from finetune.storage.rundir import RunDirectory


@pytest.mark.slow
def test_a_renewal_writes_report_and_plot_and_one_that_fails_does_no_harm(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And runs no code of the working directory, which may be a run directory that somebody else made."""
    monkeypatch.setattr(renewal, "_EVERY_SECONDS", 0)
    for name in ("json.py", "torch.py", "typer.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    renewal_of_it = Renewal(run)
    renewal_of_it.renew()
    under_way = renewal_of_it._process
    renewal_of_it.renew()
    assert renewal_of_it._process is under_way, "one at a time"
    assert under_way.wait(600) == 0
    assert run.report_file.stat().st_size
    assert run.plot_file.stat().st_size
    assert not (tmp_path / "it_ran").exists()
    for failing in ("/bin/false", "/nowhere", "/bin/false"):  # the report's command, and the start of a process
        monkeypatch.setattr(sys, "executable", failing)
        renewal_of_it.renew()
        if renewal_of_it._process:
            renewal_of_it._process.wait()
    renewal_of_it.stop()


def test_a_short_run_starts_no_process(run: RunDirectory) -> None:
    short = Renewal(run)
    short.renew()
    assert short._process is None
    short.stop()
