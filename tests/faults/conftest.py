"""Processes of their own for the tests that inject a fault into the whole of one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from children import Children, Ended, Fault
from jobs import QUICK
from rank_jobs import Jobs

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
        return RunDirectory(tmp_path / run), children.run(["train", children.config, *QUICK, *data, *overrides], fault)

    return train


@pytest.fixture(scope="session")
def jobs(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs of ranks, on 24 rows of which some are held out."""
    return Jobs(children, rows_file, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="session")
def odd_jobs(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs of ranks, on 19 rows, three steps of six and one of one row an epoch, and two that are held out."""
    folder = tmp_path_factory.mktemp("odd-jobs")
    (folder / "rows.jsonl").write_text("".join(rows_file.read_text().splitlines(keepends=True)[:21]))
    return Jobs(children, folder / "rows.jsonl", folder)
