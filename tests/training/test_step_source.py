"""The page on adding a source of steps, applied: what it gives takes the place of prepared rows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file
from steps import stopped_and_resumed

import finetune
from finetune.storage.rundir import RunDirectory
from finetune.training import assembly
from finetune.training import run as training

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the page."""
    [code] = re.findall(r"`finetune/training/counting\.py`:\n\n```python\n(.*?)^```", PAGE, re.M | re.S)
    module = ModuleType("finetune.training.counting")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where its dataclass looks names up
    exec(compile(code, module.__name__, "exec"), vars(module))  # noqa: S102 -- our own page
    return module


def test_a_run_trains_on_the_steps_of_another_source_and_resumes_within_them(quick, counting, monkeypatch) -> None:
    plain = training.train
    monkeypatch.setattr(training, "train", lambda job: plain(job, counting.Counting(assembly.collator(job))))
    job = ["training.max_steps=null", "training.epochs=1.5", "output.save_every=1"]
    whole = finetune.train(quick(*job, run="whole")).run
    resumed = stopped_and_resumed(quick(*job, run="resumed"), 3, 4)
    tokens = [8 * (5 + step % 3) for step in range(6)]
    for run in (whole, resumed):
        assert [line["tokens"] for line in run.metrics() if "loss" in line] == tokens
    assert adapter(whole).keys() == adapter(resumed).keys()
    for name, weight in adapter(whole).items():
        assert weight.equal(adapter(resumed)[name]), name


def adapter(run: RunDirectory) -> dict:
    return load_file(run.adapter / "adapter_model.safetensors")
