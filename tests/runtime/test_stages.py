"""Slow stages are announced on a terminal only, once for all ranks."""

from __future__ import annotations

import sys

import pytest

from finetune.runtime.stages import stage


@pytest.mark.parametrize(("terminal", "rank", "said"), [(True, "0", True), (True, "1", False), (False, "0", False)])
def test_a_stage_is_announced_on_the_terminal_of_rank_0(
    terminal: bool, rank: str, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("RANK", rank)
    stage("reading the rows")
    assert capsys.readouterr() == ("", "reading the rows ...\n" if said else "")
