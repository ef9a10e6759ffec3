"""No data worker can be killed or hang: rows are collated in the process that trains."""

from __future__ import annotations

import psutil
import pytest

import finetune
from finetune.training.recorder import StepRecorder


def test_rows_come_without_a_process_that_could_be_lost(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().children()
    seen = []

    def on_step_begin(self, args, state, control, train_dataloader, eval_dataloader, **kwargs) -> None:
        loaders = [loader for loader in (train_dataloader, eval_dataloader) if loader is not None]
        seen.append(([loader.num_workers for loader in loaders], psutil.Process().children()))

    monkeypatch.setattr(StepRecorder, "on_step_begin", on_step_begin)
    assert finetune.train(quick()).run.finished
    assert len(seen) == 4
    assert all(not any(workers) and children == before for workers, children in seen)
