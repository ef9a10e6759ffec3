"""Memory that runs out on one of several ranks: all repeat the step with smaller micro-batches, or end alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children import Children, Fault
from jobs import QUICK, adapter_weights, metric
from together import Together

from finetune.storage.rundir import RunDirectory, checkpoint_step

LAYERS = 2
ATTENTION = "torch.nn.functional:scaled_dot_product_attention"
STEP = "finetune.training.step:Step.forward_backward"
# Two micro-batches of four rows a rank. Plain descent, so that a gradient that is off shows as such.
JOB = [*QUICK, "data.eval_share=0.2", "training.batch_size=16", "training.micro_batch=4", "training.max_steps=3",
       "quantization.kind=none", "optimizer.kind=sgd", "training.learning_rate=0.1", "training.warmup=0",
       "training.eval_every=null", "output.save_every=1", "memory.checkpointing=all"]  # fmt: skip

Make = Callable[..., Together]


@pytest.fixture
def job(children: Children, rows_file: Path, tmp_path: Path) -> Make:
    def make(*overrides: str, run: str = "run") -> Together:
        return Together(children, [*JOB, f"data.train={rows_file}", *overrides], RunDirectory(tmp_path / run))

    return make


@pytest.fixture(scope="module")
def alone(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The job as one process trains it, undisturbed."""
    run = RunDirectory(tmp_path_factory.mktemp("alone") / "run")
    [ended] = Together(children, [*JOB, f"data.train={rows_file}"], run).go(1)
    assert ended.code == 0, ended.output
    return run


def events(run: RunDirectory, name: str) -> list[dict]:
    return [event for event in run.events() if event["event"] == name]


def assert_as(found: RunDirectory, expected: RunDirectory) -> None:
    """The same losses and the same adapter but for the order of sums."""
    assert metric(found, "loss") == pytest.approx(metric(expected, "loss"), rel=1e-5)
    torch.testing.assert_close(adapter_weights(found), adapter_weights(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        pytest.param("", 2, id="forward, in a pass that averages nothing", marks=pytest.mark.long),
        pytest.param("", LAYERS + 2, id="forward of the last pass", marks=pytest.mark.long),
        pytest.param("backward", LAYERS + 2, id="backward, when some gradients are averaged"),
    ],
)
def test_all_ranks_repeat_the_step_with_smaller_micro_batches(
    job: Make, alone: RunDirectory, place: str, nth: int
) -> None:
    together = job()
    ended = together.go(2, {1: Fault(ATTENTION, f"^{place}$", nth, "memory", after=STEP)})
    assert [each.code for each in ended] == [0, 0], ended[0].output + ended[1].output
    assert "out of memory on rank 1 at 4 rows" in ended[0].in_one_line
    for run in (together.run, together.run.of_rank(1)):
        [split] = events(run, "micro_batch_split")
        assert (split["rank"], split["rows"]) == (1, 4)
    assert_as(together.run, alone)


def test_two_ranks_that_run_out_of_memory_in_one_step_lower_the_limit_once_for_all(
    job: Make, alone: RunDirectory
) -> None:
    """Of three ranks, in the second step; each at its own place, with rows that are all cut to one length."""
    together = job("training.batch_size=12", "training.micro_batch=2", "data.max_length=16")
    steps = "finetune.training.loop:Loop.take_step"
    ended = together.go(
        3,
        {
            0: Fault(ATTENTION, "^$", 3, "memory", after=steps),
            2: Fault(ATTENTION, "backward", 2, "memory", after=steps),
        },
    )
    assert [each.code for each in ended] == [0, 0, 0], ended[0].output
    for rank in range(3):
        run = together.run.of_rank(rank) if rank else together.run
        splits = events(run, "micro_batch_split")
        assert {split["rank"] for split in splits} == {0, 2}
        assert {split["step"] for split in splits} == {1}


def test_a_row_that_does_not_fit_one_rank_ends_all_with_the_steps_before_it_saved(job: Make) -> None:
    together = job("training.micro_batch=1", "output.save_every=null")
    fault = Fault(
        ATTENTION, "backward", LAYERS + 2, "memory", after="finetune.training.recorder:MetricsRecorder.stepped"
    )
    first, second = together.go(2, {1: fault})
    assert (first.code, second.code) == (6, 6), first.output + second.output
    assert "alone in its micro-batch, on rank 1" in first.in_one_line
    assert "Step 1 was saved." in first.in_one_line
    assert second.output == "", "the first one has said it"
    assert [checkpoint_step(path) for path in together.run.complete_checkpoints()] == [1]
    assert [event["rank"] for event in events(together.run, "row_does_not_fit")] == [1]


def test_a_save_that_does_not_fit_either_is_reported_by_all_ranks_with_the_row(job: Make) -> None:
    """The rank that copies the weights, alone, runs out of memory again."""
    together = job("training.micro_batch=1", "output.save_every=null")
    stepped = "finetune.training.recorder:MetricsRecorder.stepped"
    row = Fault(ATTENTION, "backward", LAYERS + 2, "memory", after=stepped)
    copy = Fault("finetune.training.checkpoints:snapshot", "", 1, "memory")
    first, second = together.go(2, {0: copy, 1: row})
    assert (first.code, second.code) == (6, 6), first.output + second.output
    assert "alone in its micro-batch, on rank 1" in first.in_one_line
    assert "Step 1 could not be saved: rank 0: out of memory while writing" in first.in_one_line
    assert together.run.complete_checkpoints() == []


def test_an_evaluation_that_does_not_fit_one_rank_is_skipped_by_all(job: Make) -> None:
    together = job("training.batch_size=4", "training.micro_batch=1")
    fault = Fault(ATTENTION, "^$", 1, "memory", after="finetune.training.eval_loss:summed_loss")
    ended = together.go(2, {1: fault})
    assert [each.code for each in ended] == [0, 0], ended[0].output + ended[1].output
    assert len(events(together.run, "evaluation_skipped")) == 1


def test_another_error_in_a_step_ends_all_and_names_the_rank(job: Make) -> None:
    """The others wait for its gradients."""
    ended, other = job().go(2, {1: Fault(ATTENTION, "backward", LAYERS + 2, "fail", after=STEP)})
    assert "Traceback" in other.output
    assert ended.code == 4, ended.output
    assert "rank 1 ended: no matter of memory" in ended.in_one_line
