"""The trained run with its merged model, which several exports start from."""

import shutil
from pathlib import Path

import pytest

import finetune
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory


@pytest.fixture(scope="session")
def merged(trained: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The trained run, merged. Do not write to it."""
    run = RunDirectory(shutil.copytree(trained.path, tmp_path_factory.mktemp("merged") / "run"))
    finetune.merge(run, terminal=Terminal(quiet=True))
    return run


@pytest.fixture
def merged_run(merged: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of it that a test may write to."""
    return RunDirectory(shutil.copytree(merged.path, tmp_path / "run"))
