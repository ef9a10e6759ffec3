"""Memory that runs out on a rank while others wait for it within the pass: all end, and the next start takes less."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from children import ROOM, Children, Ended, Fault
from test_ranks_out_of_memory import ATTENTION, JOB, assert_as, events
from together import Together

from finetune.storage.rundir import RunDirectory

STEPPED = "finetune.training.recorder:MetricsRecorder.stepped"
EVALUATED = "finetune.training.eval_loss:summed_loss"
FSDP = "distributed.kind=fsdp"
CONTEXT = "distributed.context=2"
ZERO = ["distributed.kind=deepspeed", "memory.check=off"]
CUT = ["data.max_length=16"]
ROOM_FOR_ONE = 20
"""Positions: more than a row that is cut, and less than two."""
EXACT = ["training.precision=fp32", "adapter.dropout=0", "training.max_steps=2"]

Make = Callable[..., Together]


class Again(Together):
    """Ranks with memory for so many positions, if a number is given."""

    def start(self, processes, faults=None, own=None, environment=None, room: int | None = None):  # type: ignore[no-untyped-def]
        environment = {**({ROOM: str(room)} if room else {}), **(environment or {})}
        return super().start(processes, faults, own, environment)

    def until_it_fits(self, processes: int, room: int) -> list[list[Ended]]:
        """The ends of all ranks, of each start by the same command until memory suffices."""
        starts: list[list[Ended]] = []
        while not starts or starts[-1][0].code == 6:
            assert len(starts) < 5
            starts.append([child.wait() for child in self.start(processes, room=room)])
        return starts


@pytest.fixture(scope="module")
def job(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("again")

    def make(*overrides: str, run: str) -> Again:
        rows = f"data.train={rows_file}"
        return Again(children, [*JOB, rows, *EXACT, *overrides], RunDirectory(folder / run))

    return make


@pytest.fixture(scope="module")
def alone(job: Make) -> RunDirectory:
    """The job as one process trains it, undisturbed."""
    one = job(run="alone")
    [ended] = one.go(1)
    assert ended.code == 0, ended.output
    return one.run


@pytest.fixture(scope="module")
def cut(job: Make) -> RunDirectory:
    """The same of rows that are cut to one length."""
    one = job(*CUT, run="cut")
    [ended] = one.go(1)
    assert ended.code == 0, ended.output
    return one.run


def starts(run: RunDirectory) -> list[int]:
    """The step after which each start began."""
    return [event.get("step", 0) for event in run.events() if event["event"] in ("started", "resumed")]


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        pytest.param([FSDP], "backward", id="shards of the weights"),
        pytest.param([CONTEXT], "backward", id="slices of rows", marks=pytest.mark.long),
        pytest.param(ZERO, "backward", id="deepspeed", marks=pytest.mark.long),
    ],
)
def test_the_same_command_goes_on_from_the_last_save_with_smaller_micro_batches(
    job: Make, alone: RunDirectory, overrides: list[str], place: str, request: pytest.FixtureRequest
) -> None:
    if overrides is ZERO:
        pytest.importorskip("deepspeed")
    together = job(*overrides, run=request.node.callspec.id)
    first, second = together.go(2, {1: Fault(ATTENTION, f"^{place}$", 2, "memory", after=STEPPED)})
    assert (first.code, second.code) == (6, 6), first.output + second.output
    [lowered] = events(together.run.of_rank(1), "micro_batch_lowered")
    fewer = lowered["lowered"]["training.micro_batch"]
    assert 1 <= fewer <= lowered["rows"] / 2
    for ended in (first, second):
        assert f"Start the same again: it goes on with `training.micro_batch: {fewer}`" in ended.in_one_line
    assert "rank 1 ended: out of memory" in first.in_one_line
    ended = together.go(2)
    assert [each.code for each in ended] == [0, 0], ended[0].output + ended[1].output
    assert "in an earlier start of this run, memory ran out with more" in ended[0].in_one_line
    assert together.run.config().training.micro_batch == fewer
    assert starts(together.run) == [0, 1]
    assert_as(together.run, alone)


def test_micro_batches_are_lowered_until_they_fit(job: Make, cut: RunDirectory) -> None:
    """By the warm-up, before anything is trained."""
    together = job(FSDP, *CUT, run="small")
    ends = together.until_it_fits(2, ROOM_FOR_ONE)
    assert [[each.code for each in ended] for ended in ends] == [[6, 6], [6, 6], [0, 0]], ends
    assert together.run.config().training.micro_batch == 1
    assert starts(together.run) == [0, 0, 0]
    assert_as(together.run, cut)


def test_a_single_row_that_does_not_fit_ends_all_ranks(job: Make) -> None:
    """Where it is known beforehand, and the run has no smaller micro-batch to go on with."""
    together = job(FSDP, "training.micro_batch=1", run="row")
    fault = Fault(ATTENTION, "^backward$", 2, "memory", after=STEPPED)
    first, second = together.go(2, {1: fault})
    assert (first.code, second.code) == (6, 6), first.output + second.output
    assert "alone in its micro-batch, on rank 1" in second.in_one_line
    assert "rank 1 ended: out of memory" in first.in_one_line
    assert starts(together.run) == [0]


def test_after_an_evaluation_that_does_not_fit_the_same_command_goes_on(job: Make, alone: RunDirectory) -> None:
    together = job(FSDP, run="evaluation")
    ended = together.go(2, {1: Fault(ATTENTION, "^$", 1, "memory", after=EVALUATED)})
    assert [each.code for each in ended] == [6, 6], ended[0].output + ended[1].output
    ended = together.go(2)
    assert [each.code for each in ended] == [0, 0], ended[0].output + ended[1].output
    assert len(events(together.run.of_rank(1), "micro_batch_lowered")) == 1
    assert_as(together.run, alone)


@pytest.mark.long
def test_torchrun_starts_the_ranks_again_by_itself(
    job: Make, cut: RunDirectory, children: Children, tmp_path: Path
) -> None:
    """As `finetune launch` has it do; until a single row fits."""
    together = job(FSDP, *CUT, "training.micro_batch=2", run="torchrun")
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
    assert_as(together.run, cut)
