"""Memory that runs out on one of several ranks: all repeat the step with smaller micro-batches, or end alike.

Ranks that wait for each other within a pass end, and the next start of the same command takes less.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import ROOM, Children, Fault
from rank_jobs import EXACT, FSDP, PLAIN, UNEVALUATED, ZERO, Jobs, assert_close
from together import assert_all

from finetune.storage.rundir import RunDirectory, checkpoint_step

LAYERS = 2
ATTENTION = "torch.nn.functional:scaled_dot_product_attention"
STEP = "finetune.training.step:Step.forward_backward"
STEPPED = "finetune.training.recorder:MetricsRecorder.stepped"
EVALUATED = "finetune.training.eval_loss:summed_loss"
# Two micro-batches of four rows a rank.
JOB = [*EXACT, PLAIN, "training.batch_size=16", "training.micro_batch=4", "training.max_steps=2",
       "training.eval_every=null", "output.save_every=1", "memory.checkpointing=all"]  # fmt: skip
CUT = ["data.max_length=16"]
"""Rows of one length."""
ROOM_FOR_ONE = 20
"""Positions: more than a row that is cut, and less than two."""
ALONE = [*UNEVALUATED, "training.batch_size=4", "training.micro_batch=1"]
LAST_PASS = Fault(ATTENTION, "^backward$", LAYERS + 2, "memory", after=STEPPED)
SECOND_STEP = Fault(ATTENTION, "^backward$", 2, "memory", after=STEPPED)


def events(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == name]


def starts(run: RunDirectory) -> list[int]:
    """The step after which each start began."""
    return [event.get("step", 0) for event in run.events() if event["event"] in ("started", "resumed")]


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        pytest.param("", 2, id="forward, in a pass that averages nothing", marks=pytest.mark.long),
        pytest.param("", LAYERS + 2, id="forward of the last pass", marks=pytest.mark.long),
        pytest.param("backward", LAYERS + 2, id="backward, when some gradients are averaged"),
    ],
)
def test_all_ranks_repeat_the_step_with_smaller_micro_batches(jobs: Jobs, place: str, nth: int) -> None:
    together = jobs(*JOB)
    ended = together.go(2, {1: Fault(ATTENTION, f"^{place}$", nth, "memory", after=STEP)})
    assert_all(ended, 0)
    assert "out of memory on rank 1 at 4 rows" in ended[0].in_one_line
    for run in (together.run, together.run.of_rank(1)):
        [split] = events(run, "micro_batch_split")
        assert (split["rank"], split["rows"]) == (1, 4)
    assert_close(together.run, jobs.alone(*JOB))


def test_two_ranks_that_run_out_of_memory_in_one_step_lower_the_limit_once_for_all(jobs: Jobs) -> None:
    """Of three ranks; each at its own place, with rows that are all cut to one length."""
    together = jobs(*JOB, *CUT, *UNEVALUATED, "training.batch_size=12", "training.micro_batch=2")
    steps = "finetune.training.loop:Loop.take_step"
    places = {0: ("^$", 3), 2: ("backward", 2)}
    faults = {rank: Fault(ATTENTION, *place, "memory", after=steps) for rank, place in places.items()}
    assert_all(together.go(3, faults), 0)
    for rank in range(3):
        splits = events(together.run.of_rank(rank) if rank else together.run, "micro_batch_split")
        assert {(split["rank"], split["step"]) for split in splits} == {(0, 1), (2, 1)}


@pytest.mark.parametrize("saved", [True, False])
def test_a_row_that_does_not_fit_one_rank_ends_all_with_the_steps_before_it_saved(jobs: Jobs, saved: bool) -> None:
    """Or with what else runs out of memory: the rank that copies the weights, alone."""
    together = jobs(*JOB, *ALONE, "output.save_every=null")
    copy = Fault("finetune.training.checkpoints:snapshot", "", 1, "memory")
    first, second = together.go(2, {1: LAST_PASS} if saved else {0: copy, 1: LAST_PASS})
    assert_all([first, second], 6)
    said = "Step 1 was saved." if saved else "Step 1 could not be saved: rank 0: out of memory while writing"
    assert "alone in its micro-batch, on rank 1" in first.in_one_line
    assert said in first.in_one_line
    assert second.output == "" or not saved, "the first one has said it"
    assert [checkpoint_step(path) for path in together.run.complete_checkpoints()] == [1] * saved
    assert [event["rank"] for event in events(together.run, "row_does_not_fit")] == [1]


def test_an_evaluation_that_does_not_fit_one_rank_is_skipped_by_all(jobs: Jobs) -> None:
    together = jobs(*JOB, "training.batch_size=4", "training.micro_batch=1", "training.max_steps=1")
    assert_all(together.go(2, {1: Fault(ATTENTION, "^$", 1, "memory", after=EVALUATED)}), 0)
    assert len(events(together.run, "evaluation_skipped")) == 1


def test_another_error_in_a_step_ends_all_and_names_the_rank(jobs: Jobs) -> None:
    """The others wait for its gradients."""
    ended, other = jobs(*JOB, *UNEVALUATED).go(2, {1: Fault(ATTENTION, "backward", LAYERS + 2, "fail", after=STEP)})
    assert "Traceback" in other.output
    assert ended.code == 4, ended.output
    assert "rank 1 ended: no matter of memory" in ended.in_one_line


# -- ranks that wait for each other within a pass ---------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "faults"),
    [
        pytest.param(
            FSDP, [SECOND_STEP, Fault(ATTENTION, "^$", 1, "memory", after=EVALUATED)], id="shards, and an evaluation"
        ),
        pytest.param("distributed.context=2", [SECOND_STEP], id="slices of rows"),
        pytest.param(ZERO, [SECOND_STEP], id="deepspeed"),
    ],
)
def test_the_same_command_goes_on_from_the_last_save_with_smaller_micro_batches(
    jobs: Jobs, way: str, faults: list[Fault]
) -> None:
    if way == ZERO:
        pytest.importorskip("deepspeed")
    job = [*JOB, "training.batch_size=8"]
    together, micro_batch = jobs(*job, way), 4
    for fault in faults:
        first, second = together.go(2, {1: fault})
        assert_all([first, second], 6)
        lowered = events(together.run.of_rank(1), "micro_batch_lowered")[-1]
        fewer = lowered["lowered"]["training.micro_batch"]
        assert 1 <= fewer <= lowered["rows"] / 2 <= micro_batch / 2
        for ended in (first, second):
            assert f"Start the same again: it goes on with `training.micro_batch: {fewer}`" in ended.in_one_line
        assert "rank 1 ended: out of memory" in first.in_one_line
        micro_batch = fewer
    ended = together.go(2)
    assert_all(ended, 0)
    assert len(events(together.run.of_rank(1), "micro_batch_lowered")) == len(faults)
    assert "in an earlier start of this run, memory ran out with more" in ended[0].in_one_line
    assert together.run.config().training.micro_batch == micro_batch
    assert starts(together.run) == [0, *[1] * len(faults)]
    assert_close(together.run, jobs.alone(*job))


def test_micro_batches_are_lowered_until_they_fit(jobs: Jobs) -> None:
    """By the warm-up, before anything is trained."""
    together = jobs(*JOB, *CUT, FSDP, "training.micro_batch=2")
    for code in (6, 0):
        assert_all([child.wait() for child in together.start(2, environment={ROOM: str(ROOM_FOR_ONE)})], code)
    assert together.run.config().training.micro_batch == 1
    assert starts(together.run) == [0, 0]
    assert_close(together.run, jobs.alone(*JOB, *CUT))


def test_a_single_row_that_does_not_fit_ends_all_ranks(jobs: Jobs) -> None:
    """Where it is known beforehand, and the run has no smaller micro-batch to go on with."""
    together = jobs(*JOB, *ALONE, FSDP)
    first, second = together.go(2, {1: SECOND_STEP})
    assert_all([first, second], 6)
    assert "alone in its micro-batch, on rank 1" in second.in_one_line
    assert "rank 1 ended: out of memory" in first.in_one_line
    assert starts(together.run) == [0]


@pytest.mark.long
def test_torchrun_starts_the_ranks_again_by_itself(jobs: Jobs, children: Children, tmp_path: Path) -> None:
    """As `finetune launch` has it do; until a single row fits."""
    together = jobs(*JOB, *CUT, FSDP, "training.micro_batch=2")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    rank = [Path(__file__).with_name("forked_rank.py"), children.address, tmp_path]
    ended = subprocess.run(
        [sys.executable, *torchrun, *map(str, [*rank, *together.arguments])],
        env={**os.environ, ROOM: str(ROOM_FOR_ONE), "OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert together.run.finished, ended.stdout
    assert together.run.config().training.micro_batch == 1
    assert starts(together.run) == [0, 0]
    assert_close(together.run, jobs.alone(*JOB, *CUT))
