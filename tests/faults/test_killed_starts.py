"""Exact training that is killed while it makes the weights that it starts from, and after that is started again."""

from __future__ import annotations

import signal
from collections.abc import Callable

from children import Ended, Fault
from jobs import same_adapter

from finetune.storage.rundir import RunDirectory

EXACT = ["output.serve=q4_0", "output.way=exact", "training.max_steps=1"]
HALF_MADE = (Fault("open", r"start\.incomplete/layer-00001"), Fault("rename", r"start\.incomplete$"))
BEFORE_ITS_EVENT = Fault("finetune.export.rounding.exact_start:digest")


def test_only_complete_weights_are_started_from(train_apart: Callable[..., tuple[RunDirectory, Ended]]) -> None:
    for fault in (*HALF_MADE, BEFORE_ITS_EVENT):
        run, ended = train_apart(fault, *EXACT)
        assert ended.code == -signal.SIGKILL, ended.output
        assert run.start.exists() == (fault is BEFORE_ITS_EVENT)
        assert run.start_sha256 is None, "no later command reads it"
    complete = {file.name: file.stat().st_ino for file in run.start.iterdir()}
    run, ended = train_apart(None, *EXACT)
    assert ended.code == 0, ended.output
    assert {file.name: file.stat().st_ino for file in run.start.iterdir()} == complete, "what was complete is kept"
    assert not [*run.path.rglob("*.incomplete"), *run.path.rglob("*.replaced"), *run.path.rglob("*.part")]
    whole, ended = train_apart(None, *EXACT, run="elsewhere/run")  # side by side, it would share the other's files
    assert ended.code == 0, ended.output
    assert run.start_sha256 == whole.start_sha256
    assert same_adapter(run, whole)
