"""One builder for all: no command makes a model past it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from messages import refusal

import finetune
from finetune.errors import ForecastError
from finetune.model import build
from finetune.storage.rundir import RunDirectory


class _Built(Exception):
    """The builder was called."""


def _stop(*arguments: object, **named: object) -> None:
    raise _Built


def test_training_inference_evaluation_and_merge_load_their_base_by_one_builder(
    trained: RunDirectory, quick: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained.path, tmp_path / "copy")
    run = RunDirectory(tmp_path / "copy")
    monkeypatch.setattr(build, "load_base", _stop)
    monkeypatch.setattr(build, "weightless_base", _stop)  # a merge reads the weights one by one
    uses = (
        lambda: finetune.train(quick()),
        lambda: finetune.generate(run, "Say 3"),
        lambda: finetune.evaluate(run),
        lambda: finetune.merge(run),
    )
    for use in uses:
        with pytest.raises(_Built):
            use()


def test_the_forecast_traces_the_base_of_that_builder(quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "weightless_base", _stop)
    with refusal(ForecastError, "_Built"):
        finetune.plan(quick(), "24GiB")
