"""Processes of their own for the tests that inject a fault into the whole of one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from children import Children, Ended, Fault
from jobs import QUICK, TINY

from finetune.storage.rundir import RunDirectory


@pytest.fixture
def unwarmed() -> None:
    """Runs with all that may fail in them."""


@pytest.fixture
def train_apart(children: Children, rows_file: Path, tmp_path: Path) -> Callable[..., tuple[RunDirectory, Ended]]:
    """A function that trains a job of seconds in a child, with a fault.

    A limit on memory needs that: a process that has run other tests holds freed memory, which needs no new.
    """

    def train(fault: Fault | None, *overrides: str, run: str = "run") -> tuple[RunDirectory, Ended]:
        data = [f"data.train={rows_file}", "data.eval_share=0.2", f"output.dir={tmp_path / run}"]
        return RunDirectory(tmp_path / run), children.run(["train", TINY, *QUICK, *data, *overrides], fault)

    return train
