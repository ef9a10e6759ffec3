"""Several processes train what one trains, and their number may change on resume."""

from __future__ import annotations

import json
import signal
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children import Children, Fault
from jobs import QUICK, adapter_weights, metric, same_adapter, sampled
from steps import before_each_step
from together import Together, assert_all

import finetune
from finetune.runtime import ranks
from finetune.storage.rundir import RunDirectory
from finetune.training.step import Step

STEP = "finetune.training.step:Step.clip"
# 19 rows: three steps of six and one of one row an epoch.
ROWS = [*QUICK, "data.eval_share=0.2", "training.batch_size=6", "training.micro_batch=1", "training.max_steps=6"]
# Plain descent, so that a gradient that is off shows as such.
EXACT = ["quantization.kind=none", "optimizer.kind=sgd", "training.learning_rate=0.1", "training.warmup=0",
         "training.eval_every=2", "output.save_every=2"]  # fmt: skip
RANDOM = ["adapter.dropout=0.1", "optimizer.kind=adamw_8bit", "data.packing=true", "output.save_every=2",
          "training.eval_every=null", "data.eval=none"]  # fmt: skip

Make = Callable[..., Together]


@pytest.fixture(scope="module")
def rows(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:21]))
    return file


@pytest.fixture
def job(children: Children, rows: Path, tmp_path: Path) -> Make:
    def make(*overrides: str, run: str = "run") -> Together:
        return Together(children, [*ROWS, f"data.train={rows}", *overrides], RunDirectory(tmp_path / run))

    return make


@pytest.fixture(scope="module")
def alone(children: Children, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The exact job as one process trains it. Do not write to it."""
    run = RunDirectory(tmp_path_factory.mktemp("alone") / "run")
    assert_all(Together(children, [*ROWS, f"data.train={rows}", *EXACT], run).go(1), 0)
    return run


def assert_close(found: RunDirectory, expected: RunDirectory) -> None:
    torch.testing.assert_close(adapter_weights(found), adapter_weights(expected), rtol=0, atol=1e-6)


def test_several_processes_train_what_one_trains(job: Make, alone: RunDirectory) -> None:
    """Also in an epoch's last step, which has one row for all of them, and with two held-out rows."""
    together = job(*EXACT, "memory.check=warn")
    ended = together.go(3)
    assert_all(ended, 0)
    assert_close(together.run, alone)
    assert metric(together.run, "tokens") == metric(alone, "tokens")
    for name in ("loss", "grad_norm", "eval_loss"):
        assert metric(together.run, name) == pytest.approx(metric(alone, name), rel=1e-5)
    # The first process alone writes the run and prints.
    first, *others = ended
    assert "6 rows over 3 processes; each 2 rows = 2 micro-batches of 1" in first.output
    assert [each.output for each in others] == ["", ""]
    names = [event["event"] for event in together.run.events()]
    assert names.count("largest_batch_fits") == names.count("trained") == names.count("finished") == 1
    assert json.loads(together.run.forecast_file.read_text())["fits"]
    own = together.run.of_rank(1)
    assert sorted(path.name for path in own.path.iterdir()) == ["events.jsonl", "metrics.jsonl"]
    assert metric(own, "step", "loss") == metric(together.run, "step", "loss")


def test_killed_processes_resume_to_the_same_bits(job: Make) -> None:
    """With the random numbers of each, 8-bit states and packed rows."""
    whole, killed = job(*RANDOM, run="whole"), job(*RANDOM, run="killed")
    assert_all(whole.go(2), 0)
    killed.kill(2, step=4, saved=2)
    assert not killed.run.adapter.exists()
    assert_all(killed.go(2), 0)
    assert [event["step"] for event in killed.run.events() if event["event"] == "resumed"] == [2]
    assert same_adapter(killed.run, whole.run)


def test_another_number_of_processes_goes_on_with_the_same_rows_and_is_logged(job: Make, alone: RunDirectory) -> None:
    """Fewer, and then more."""
    changed = job(*EXACT)
    changed.kill(2, step=4, saved=2)
    changed.kill(1, step=3, saved=4)
    assert_all(changed.go(3), 0)
    events = [event for event in changed.run.events() if event["event"] == "changed"]
    assert [event["processes"] for event in events] == [[2, 1], [1, 3]]
    assert_close(changed.run, alone)
    assert metric(changed.run, "loss") == pytest.approx(metric(alone, "loss"), rel=1e-5)


@pytest.mark.parametrize(("signalled", "step"), sampled([(0, 3), (1, 4)], (1, 4)))
def test_a_signal_to_one_process_saves_and_ends_all(job: Make, alone: RunDirectory, signalled: int, step: int) -> None:
    """Before the evaluation that step 4 owes, which a resume makes up for."""
    stopped = job(*EXACT)
    assert_all(stopped.go(2, {signalled: Fault(STEP, nth=step, action="SIGTERM")}), 143)
    assert stopped.run.saved_steps == [2, step]
    assert len(metric(stopped.run, "eval_loss")) == 2
    assert not stopped.run.adapter.exists()
    assert_all(stopped.go(2), 0)
    assert_close(stopped.run, alone)
    assert metric(stopped.run, "eval_loss") == pytest.approx(metric(alone, "eval_loss"), rel=1e-5)


@pytest.mark.long
def test_a_signal_in_the_evaluation_that_ends_two_ranks_early_adds_no_step(job: Make) -> None:
    early = ["training.max_steps=30", "training.micro_batch=3", "training.eval_every=1", "training.early_stopping=1",
             "training.learning_rate=0.5", "training.schedule=constant", "output.best=false"]  # fmt: skip
    whole = job(*early, run="whole")
    assert_all(whole.go(2), 0)
    evaluated = metric(whole.run, "eval_loss")
    assert len(evaluated) < 30, "the job was meant to stop early"
    stopped = job(*early)
    last = Fault("finetune.training.eval_loss:EvalLoss.loss", nth=len(evaluated), action="SIGTERM")
    assert_all(stopped.go(2, {1: last}), 143)
    assert stopped.run.saved_steps[-1] == whole.run.steps_done
    assert_all(stopped.go(2), 0)
    assert metric(stopped.run, "eval_loss") == evaluated
    assert same_adapter(stopped.run, whole.run)


def test_what_shares_the_model_is_gone_before_the_ranks_part(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed afterwards, it ends the process group with Python's lock held, and a rank now and then never ended."""
    steps: list[weakref.ref[Step]] = []
    left: list[Step | None] = []
    before_each_step(monkeypatch, lambda loop: steps.append(weakref.ref(loop.step)))
    monkeypatch.setattr(ranks, "leave", lambda: left.append(steps[0]()))
    finetune.train(quick("training.max_steps=1", "data.eval=none", "training.eval_every=null"))
    assert left == [None]


def test_processes_are_refused_where_another_one_trains(job: Make) -> None:
    """By the first of them, which tells the others."""
    held = job(*EXACT)
    [other] = held.start(1, {0: Fault(STEP, nth=2, action="SIGSTOP")})
    other.wait_until_stopped()
    first, second = held.go(2)
    assert (first.code, second.code) == (4, 4), first.output + second.output
    assert f"in use by process {other.pid}" in " ".join(first.output.split())
    assert second.output == ""
    other.send(signal.SIGKILL)
    other.wait()
