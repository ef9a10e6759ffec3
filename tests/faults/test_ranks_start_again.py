"""Memory that runs out on a rank while others wait for it within the pass: all agree on less and start again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from children import AGAIN, ROOM, ROOT, Children, Fault
from test_ranks_out_of_memory import JOB, MLP, assert_as, events, said
from together import Together

from finetune.storage.rundir import RunDirectory

STEPPED = "finetune.training.recorder:Recorder.stepped"
LOWERED = "finetune.training.oom_retry:settings"
EVALUATED = "finetune.training.eval_loss:summed_loss"
FSDP = "distributed.kind=fsdp"
CONTEXT = "distributed.context=2"
ZERO = ["distributed.kind=deepspeed", "memory.check=off"]
CUT = ["data.max_length=16"]
ROOM_FOR_ONE = 20
"""Positions: more than a row that is cut, and less than two."""
EXACT = ["training.precision=fp32", "adapter.dropout=0"]

Make = Callable[..., Together]


class Again(Together):
    """Ranks that may start again, with memory for so many positions, if a number is given."""

    def start(self, processes, faults=None, own=None, environment=None, room: int | None = None):  # type: ignore[no-untyped-def]
        environment = {AGAIN: "1", **({ROOM: str(room)} if room else {}), **(environment or {})}
        return super().start(processes, faults, own, environment)


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
        pytest.param([FSDP], "", id="slices of the weights, forward"),
        pytest.param([FSDP], "backward", id="slices of the weights, backward"),
        pytest.param([CONTEXT], "backward", id="slices of rows"),
        pytest.param(ZERO, "backward", id="deepspeed", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_go_on_from_the_last_save_with_smaller_micro_batches(
    job: Make, alone: RunDirectory, overrides: list[str], place: str, request: pytest.FixtureRequest
) -> None:
    if overrides is ZERO:
        pytest.importorskip("deepspeed")
    together = job(*overrides, run=request.node.callspec.id)
    ended = together.go(2, {1: Fault(MLP, f"^{place}$", 2, "memory", after=STEPPED)})
    assert [each.code for each in ended] == [0, 0], ended[0].output + ended[1].output
    [lowered] = events(together.run, "micro_batch_lowered")
    assert f"out of memory on rank 1 at {lowered['rows']} rows" in said(ended[0])
    fewer = lowered["lowered"]["training.micro_batch"]
    assert 1 <= fewer <= lowered["rows"] / 2
    assert together.run.config().training.micro_batch == fewer
    assert starts(together.run) == [0, 1]
    assert_as(together.run, alone)


def test_micro_batches_are_lowered_until_they_fit(job: Make) -> None:
    """By the warm-up, before anything is trained; and `--fresh` does not move the run aside each time."""
    together = job(FSDP, *CUT, run="small")
    assert [each.code for each in together.go(2)] == [0, 0]
    together.arguments.append("--fresh")
    ended = [child.wait() for child in together.start(2, room=ROOM_FOR_ONE)]
    assert [each.code for each in ended] == [0, 0], ended[0].output + ended[1].output
    assert [event["lowered"]["training.micro_batch"] for event in events(together.run, "micro_batch_lowered")] == [2, 1]
    assert starts(together.run) == [0, 0, 0]
    assert_as(together.run, RunDirectory(f"{together.run.path}.1"))


def test_a_single_row_that_does_not_fit_ends_all_ranks(job: Make) -> None:
    """Where it is known beforehand, and the run has no smaller micro-batch to go on with."""
    together = job(FSDP, "training.micro_batch=1", run="row")
    fault = Fault(MLP, "^backward$", 2, "memory", after=STEPPED)
    first, second = together.go(2, {1: fault})
    assert (first.code, second.code) == (6, 6), first.output + second.output
    assert "alone in its micro-batch, on rank 1" in said(second)
    assert "rank 1 ended: out of memory" in said(first)
    assert starts(together.run) == [0]
    assert [each.code for each in together.go(2)] == [0, 0]


def test_an_evaluation_that_does_not_fit_starts_all_ranks_again(job: Make, alone: RunDirectory) -> None:
    together = job(FSDP, run="evaluation")
    ended = together.go(2, {1: Fault(MLP, "^$", 1, "memory", after=EVALUATED)})
    assert [each.code for each in ended] == [0, 0], ended[0].output + ended[1].output
    assert len(events(together.run, "micro_batch_lowered")) == 1
    assert_as(together.run, alone)


def test_a_disk_that_takes_no_record_ends_the_run_as_before(job: Make) -> None:
    """Without one, a new start would run out of memory in the same place, and so on."""
    together = job(FSDP, run="full disk")
    out, full = Fault(MLP, "^$", 2, "memory", after=STEPPED), Fault("open", "events.jsonl", 1, 28, after=LOWERED)
    first, second = together.go(2, {0: full, 1: out})
    assert (first.code, second.code) == (6, 6), first.output + second.output
    assert "cannot start again with smaller micro-batches" in said(second)


# -- processes that are replaced for real ------------------------------------------------------------------------------


def ranks_of(together: Together, way: str, *launcher: str, environment: dict[str, str] | None = None) -> list[str]:
    """What ranks with memory for one row at a time printed, or their launcher."""
    script = Path(__file__).with_name("small_card.py")
    command = [*launcher, str(script), str(ROOM_FOR_ONE), way, *together.arguments]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "faults")])
    shared = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ranks = [{}] if environment is None else [{**environment, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(2)]
    running = [
        subprocess.Popen(
            command, env={**shared, **own}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
        )
        for own in ranks
    ]
    return [each.communicate(timeout=300)[0] for each in running]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_processes_are_replaced_by_their_own_command(job: Make, cut: RunDirectory, launcher: str) -> None:
    """torchrun keeps its store and sees the same processes; without it, rank 0 takes its store with it."""
    together = job(FSDP, *CUT, "training.micro_batch=2", run=f"replaced by {launcher}")
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        said = ranks_of(together, "command", *torchrun)
    else:
        static = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        said = ranks_of(together, "command", sys.executable, environment=static)
    assert together.run.finished, said
    assert [event["lowered"]["training.micro_batch"] for event in events(together.run, "micro_batch_lowered")] == [1]
    assert_as(together.run, cut)


@pytest.mark.slow
def test_a_script_is_not_run_again_but_told_to_and_then_goes_on(job: Make, cut: RunDirectory) -> None:
    together = job(FSDP, *CUT, "training.micro_batch=2", run="script")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    [said] = ranks_of(together, "script", *torchrun)
    assert "Start the same again: it goes on with `training.micro_batch: 1`" in said
    assert not together.run.finished
    ended = [child.wait() for child in together.start(2, room=ROOM_FOR_ONE)]
    assert [each.code for each in ended] == [0, 0], ended[0].output + ended[1].output
    assert_as(together.run, cut)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
