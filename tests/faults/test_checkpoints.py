"""Kills, full and failing disks, damaged files, signals and a second process, around checkpoints and their resume.

Every fault is injected for real, in a process of its own: kills, a full tmpfs, kernel limits, flipped bits.
"""

from __future__ import annotations

import errno
import importlib.metadata
import itertools
import json
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from children import Child, Children, Ended, Fault, contents
from jobs import adapter_weights, mounted
from messages import refusal
from safetensors.torch import load_file, save
from signed import sign

import finetune
from finetune.config import OptimizerSection
from finetune.errors import DataError, NumbersError
from finetune.model.distributed import optimizer_states
from finetune.model.distributed.engine import OneProcess
from finetune.recipe import provenance, resume
from finetune.runtime.randomness import RandomState
from finetune.storage import checkpoint
from finetune.storage.files import write_lines
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training import optimizers, state

STEPS = 9
# Within a step, after its backward pass. The steps of the worst batch, before the first, do not come by here.
STEP = "finetune.training.step:Step.clip"
# That of the warm-up comes first, then that before the first step.
EVALUATION = "finetune.training.eval_loss:summed_loss"
# Dropout, accumulation, 8-bit states, rows shuffled in groups, more than one epoch, evaluations between the saves.
JOB = [
    "quantization.kind=none", "adapter.dropout=0.1", "adapter.rank=32", "adapter.targets=[q_proj, v_proj]",
    "memory.checkpointing=none", "optimizer.kind=paged_adamw_8bit",
    "data.eval_share=0.2", "training.batch_size=4", "training.micro_batch=2", f"training.max_steps={STEPS}",
    "training.eval_every=4", "output.save_every=2", "output.merge=false", "memory.check=off",
]  # fmt: skip


class Job:
    """One job, started as often as it takes in one run directory."""

    def __init__(self, children: Children, folder: Path, job: list[str]) -> None:
        self.run = RunDirectory(folder)
        self.arguments = ["train", children.config, *job, f"output.dir={folder}"]
        self.children = children

    def start(self, fault: Fault | None = None, *more: str) -> Child:
        return self.children.start([*self.arguments, *more], fault)

    def go(self, fault: Fault | None = None, *more: str) -> Ended:
        return self.start(fault, *more).wait()

    def ends(self, code: int, fault: Fault | None = None, *more: str) -> str:
        """All that it prints, in one line, up to this end."""
        ended = self.go(fault, *more)
        assert ended.code == code, ended.output
        assert "Traceback" not in ended.output
        return ended.in_one_line

    @property
    def weights(self) -> bytes:
        return (self.run.adapter / "adapter_model.safetensors").read_bytes()

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        return [(line["step"], line["eval_loss"]) for line in self.run.metrics() if "eval_loss" in line]

    def assert_as(self, whole: Job) -> None:
        assert self.weights == whole.weights
        assert self.evaluations == whole.evaluations


@pytest.fixture
def job(children: Children, rows_file: Path, tmp_path: Path):
    """A function from overrides to a job in a directory of its own."""

    def make(overrides: list[str] = JOB, folder: Path = tmp_path / "run") -> Job:
        return Job(children, folder, [f"data.train={rows_file}", *overrides])

    return make


@pytest.fixture(scope="module")
def whole(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The uninterrupted run. Do not write to it."""
    job = Job(children, tmp_path_factory.mktemp("whole") / "run", [f"data.train={rows_file}", *JOB])
    job.ends(0)
    return job


# A learning rate at which the held-out loss soon rises, so that the run stops early.
EARLY = [*JOB, "training.max_steps=30", "training.eval_every=1", "training.early_stopping=2",
         "training.learning_rate=0.5", "training.schedule=constant", "output.best=false"]  # fmt: skip


@pytest.fixture(scope="module")
def whole_early(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The uninterrupted run that stops early. Do not write to it."""
    job = Job(children, tmp_path_factory.mktemp("early") / "run", [f"data.train={rows_file}", *EARLY])
    job.ends(0)
    assert job.run.steps_done < 30, "the job was meant to stop early"
    return job


def made(folder: Path) -> RunDirectory:
    """An empty run directory."""
    folder.mkdir()
    return RunDirectory(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    yield from mounted(tmp_path / "disk", "6m")


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["mkdir", "open", "fsync", "rename", "remove"])
def test_a_kill_at_any_write_fsync_or_rename_of_a_save_leaves_a_whole_checkpoint(
    children: Children, tmp_path: Path, event: str
) -> None:
    """The third save replaces the first. Each event of that kind in turn, until none is left."""
    for nth in itertools.count(1):
        run = made(tmp_path / f"{event}{nth}")
        for step in (1, 2):
            checkpoint.write(run, contents(step))
        ended = children.run(["save", run.path, 3], Fault(event, str(run.path), nth))
        newest, damaged = checkpoint.newest_valid(run)
        assert newest is not None
        assert checkpoint_step(newest) in (2, 3)
        assert damaged == {}, "what stands under a checkpoint's name is whole"
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL
        run.remove_leftovers()
        assert children.run(["save", run.path, 4]).code == 0
        assert {path.name for path in run.checkpoints.iterdir()} <= {
            "latest", "step-00000002", "step-00000003", "step-00000004",
        }  # fmt: skip
        assert (run.checkpoints / "latest").read_text() == "step-00000004\n"
    assert nth > 1, f"a save has no {event}"


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "merged.replaced").mkdir()
    (tmp_path / "merged.replaced" / "weights").write_text("old")
    (tmp_path / "merged.incomplete").mkdir()
    run.remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    assert (tmp_path / "merged" / "weights").read_text() == "old"


def test_killed_three_times_a_run_ends_with_the_same_bits(job, whole: Job) -> None:
    """In the middle of a step, in the middle of a write, and at a publication: in both epochs."""
    killed = job()
    for fault in (
        Fault(STEP, nth=4, once=str(killed.run.checkpoint(2))),
        Fault(file_bytes=150_000, dies=True),
        Fault("rename", "step-00000008.incomplete$"),
    ):
        ended = killed.go(fault)
        assert ended.code < 0, ended.output
    killed.ends(0)
    killed.assert_as(whole)
    assert [line["step"] for line in killed.run.metrics() if "loss" in line] == list(range(1, STEPS + 1))
    assert [event["step"] for event in killed.run.events() if event["event"] == "resumed"] == [2, 2, 6]
    assert not list(killed.run.path.rglob("*.incomplete"))


# -- disks ------------------------------------------------------------------------------------------------------------


BYTES = r"; [\d,]+ bytes are free"
FAILED_SAVES = {
    **{
        file: (
            Fault("open", f"checkpoints/.*{file}", action="fill"),
            rf"checkpoint at step 2 could not be written to .*No space left on device{BYTES}; "
            r"[\d,]+ bytes are needed\. Earlier checkpoints are untouched: free some space",
        )
        for file in ("adapter", "b", "state", "manifest")
    },
    # The checkpoint itself is published by then.
    "latest": (
        Fault("open", "checkpoints/.*latest", action="fill"),
        f"checkpoints/latest could not be written: No space left on device{BYTES}",
    ),
    **{
        event: (Fault(event, "step-00000002.incomplete", action=errno.EIO), "Input/output error")
        for event in ("open", "fsync", "rename", "mkdir")
    },
    "size": (Fault(file_bytes=2048), "File too large"),
    "bits": (Fault("read", "adapter.safetensors", action="flip"), "reads back differently than it was written"),
}
"""Faults of a disk, by file or event, and what is said of them."""


@pytest.mark.parametrize("name", FAILED_SAVES)
def test_a_save_that_fails_ends_in_4_with_the_checkpoint_before(
    children: Children, request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    fault, said = FAILED_SAVES[name]
    disk = request.getfixturevalue("small_disk") if fault.action == "fill" else tmp_path
    run = made(disk / "run")
    checkpoint.write(run, contents(1))
    ended = children.run(["save", run.path, 2], fault)
    assert ended.code == 4
    assert re.search(said, ended.in_one_line), ended.output
    assert checkpoint.newest_valid(run) == (run.checkpoint(2 if name == "latest" else 1), {})
    (disk / "filler").unlink(missing_ok=True)
    assert children.run(["save", run.path, 2]).code == 0


def test_a_training_on_a_full_disk_ends_in_4_and_goes_on_when_there_is_room(job, whole: Job, small_disk: Path) -> None:
    """First a line of metrics does not fit, then the save finds the room gone before it writes."""
    starved = job(folder=small_disk / "run")
    said = starved.ends(4, Fault("rename", "step-00000002.incomplete", action="fill"))
    assert re.search(r"could not be written: No space left on device; [\d,]+ bytes are free", said)
    assert starved.run.complete_checkpoints() == [starved.run.checkpoint(2)]
    # Room for lines, not for a checkpoint.
    (small_disk / "filler").unlink()
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**20))
    assert re.search(r"checkpoint at step \d could not be written.* not enough disk space; [\d,]+ bytes are free; "
                     r"[\d,]+ bytes are needed\. ", starved.ends(4))  # fmt: skip
    (small_disk / "filler").unlink()
    starved.ends(0)
    starved.assert_as(whole)


def test_a_directory_that_turned_read_only_or_vanished_ends_in_4(children: Children, small_disk: Path) -> None:
    def save(run: Path) -> str:
        ended = children.run(["save", run, 2])
        assert ended.code == 4
        return ended.output

    run = made(small_disk / "run")
    checkpoint.write(run, contents(1))
    (small_disk / "file").write_text("")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    said = save(run.path)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert "Read-only file system; 1,0" in said
    assert "make its file system writable" in said
    assert "free some space" not in said
    assert checkpoint.newest_valid(run) == (run.checkpoint(1), {})
    assert "Not a directory" in save(small_disk / "file" / "run")
    assert "No such file or directory" in save(small_disk / "gone")
    assert not (small_disk / "gone").exists()


def test_a_run_directory_that_vanishes_while_training_ends_in_4(job) -> None:
    orphan = job()
    child = orphan.start(Fault(STEP, nth=3, action="SIGSTOP"))
    child.wait_until_stopped()
    shutil.rmtree(orphan.run.path)
    child.send(signal.SIGCONT)
    ended = child.wait()
    assert ended.code == 4, ended.output
    said = ended.in_one_line  # of a line of metrics, or of the checkpoint that was being written
    assert "could not be written" in said
    assert "No such file or directory" in said
    assert "Traceback" not in said


MERGED = [*JOB, "output.merge=true", "training.max_steps=1", "data.eval=none", "training.eval_every=null"]


def test_a_disk_full_at_the_merge_leaves_the_adapter_and_a_merge_that_can_be_done_again(job, small_disk: Path) -> None:
    merging = job(MERGED, small_disk / "run")
    assert "the adapter is safe in" in merging.ends(4, Fault("mkdir", r"merged\.incomplete", action="fill"))
    adapter = merging.weights
    assert not merging.run.merged.exists()
    (small_disk / "filler").unlink()
    ended = merging.children.run(["merge", merging.run.path])
    assert ended.code == 0, ended.output
    assert merging.run.is_merged
    assert merging.weights == adapter


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(whole: Job, tmp_path: Path) -> RunDirectory:
    """A copy of the run as a kill after its last checkpoint leaves it; to be damaged."""
    run = RunDirectory(shutil.copytree(whole.run.path, tmp_path / "run"))
    shutil.rmtree(run.adapter)
    write_lines(run.events_file, [event for event in run.events() if event["event"] not in ("trained", "finished")])
    return run


FILES = ["adapter_config.json", "adapter_model.safetensors", "manifest.json", "optimizer.safetensors", "state.json",
         "trainer_state.json"]  # fmt: skip


def test_a_run_falls_back_to_the_newest_whole_checkpoint_and_says_so(job, whole: Job, damaged: RunDirectory) -> None:
    older, newest = damaged.complete_checkpoints()
    assert sorted(path.name for path in newest.iterdir()) == FILES
    file = newest / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = job(folder=damaged.path)
    said = again.ends(0)
    assert f"{newest.name} cannot be used (optimizer.safetensors is damaged" in said
    assert re.search(rf"resuming from .*{older.name}", said)
    assert newest.with_name(newest.name + ".damaged").is_dir(), "nothing is deleted silently"
    assert again.weights == whole.weights
    (event,) = [event for event in damaged.events() if event["event"] == "checkpoint_damaged"]
    assert (event["step"], event["moved_to"]) == (STEPS, newest.name + ".damaged")


@pytest.mark.parametrize("how", ["no checkpoint", "a flag"])
def test_without_a_whole_checkpoint_a_run_ends_in_7_and_never_starts_over(job, damaged: RunDirectory, how: str) -> None:
    for folder in damaged.complete_checkpoints():
        if how == "no checkpoint":
            shutil.rmtree(folder)
        else:
            (folder / "state.json").unlink()
    before = damaged.metrics_file.read_bytes()
    again = job(folder=damaged.path)
    for _ in range(2 if how == "a flag" else 1):
        said = again.ends(7)
        assert "no checkpoint in" in said
        assert ("state.json is missing" in said) == (how != "no checkpoint")
    assert damaged.metrics_file.read_bytes() == before
    if how == "a flag":
        again.ends(0, None, "training.max_steps=1", "--fresh")
        assert damaged.path.with_name("run.1").is_dir()


def test_a_checkpoint_with_weights_that_are_not_finite_is_not_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    made = contents(1)
    made.tensors["b.safetensors"]["weight"][7] = float("nan")
    with refusal(NumbersError, "step 1"):
        checkpoint.write(run, made)
    assert run.complete_checkpoints() == []


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "saved"),
    [
        pytest.param(Fault(STEP, nth=3, action="SIGTERM SIGTERM"), 3, id="step", marks=pytest.mark.long),
        pytest.param(Fault(STEP, nth=3, action="SIGINT"), 3, id="Ctrl-C"),
        pytest.param(Fault("open", r"step-00000004\.incomplete/opt", action="SIGTERM"), 5, id="save"),
        pytest.param(Fault(STEP, nth=STEPS, action="SIGTERM"), STEPS, id="last step", marks=pytest.mark.long),
        pytest.param(Fault(EVALUATION, nth=5, action="SIGTERM"), STEPS, id="last evaluation", marks=pytest.mark.long),
    ],
)
def test_a_signal_in_training_saves_and_a_resume_ends_with_the_same_bits(
    job, whole: Job, fault: Fault, saved: int
) -> None:
    code, name = (130, "interrupted") if fault.action == "SIGINT" else (143, "terminated")
    stopped = job()
    said = stopped.ends(code, fault)
    assert f"step {saved} is saved" in said
    assert name in said
    assert checkpoint.newest_valid(stopped.run) == (stopped.run.checkpoint(saved), {})
    assert stopped.run.events()[-1]["event"] == name
    stopped.ends(0)
    stopped.assert_as(whole)


@pytest.mark.parametrize(
    ("moment", "nth", "owed"),
    [
        pytest.param(EVALUATION, 1, 1, id="in the last one"),
        pytest.param("finetune.training.progress:Progress.gains", -1, 0, id="uncounted", marks=pytest.mark.long),
        pytest.param("finetune.training.recorder:MetricsRecorder.evaluated", 0, 0, id="unwritten"),
        pytest.param("finetune.report.terminal:Terminal.evaluated", 0, 0, id="written", marks=pytest.mark.long),
    ],
)
def test_sigterm_around_the_evaluation_that_ends_a_run_early_adds_no_step_and_counts_each_evaluation_once(
    job, whole_early: Job, moment: str, nth: int, owed: int
) -> None:
    """Within the last evaluation, which a resume makes up for, or once the loss of the one before it is known.

    That is the first of two without a gain: counted twice, it would end the run. `nth`: of the moments, counted from
    the run's last step; the evaluation before the first step is counted by nobody, and that of the warm-up by one.
    """
    last, evaluated = whole_early.run.steps_done, whole_early.evaluations
    losses = [loss for _, loss in evaluated]
    assert losses[last - 1] >= min(losses[1 : last - 1]), "the evaluation before the last one has no gain"
    stopped = job(EARLY)
    stopped.ends(143, Fault(moment, nth=last + nth + owed, action="SIGTERM"))
    assert stopped.run.complete_checkpoints()[-1] == stopped.run.checkpoint(last - 1 + owed)
    assert stopped.evaluations == evaluated[:last]
    stopped.ends(0)
    stopped.assert_as(whole_early)


def test_a_postponed_evaluation_is_logged_once_even_after_a_kill(job, whole: Job) -> None:
    stopped = job()
    assert "step 4 is saved" in stopped.ends(143, Fault(EVALUATION, nth=3, action="SIGTERM"))
    stopped.ends(-signal.SIGKILL, Fault("finetune.report.terminal:Terminal.evaluated"))
    assert stopped.evaluations == whole.evaluations[:2]
    stopped.ends(0)
    stopped.assert_as(whole)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("read", r"rows\.jsonl$", action="SIGTERM"), id="reading", marks=pytest.mark.long),
        pytest.param(
            Fault("finetune.data.tokenizing:_tokenized", action="SIGTERM"), id="tokenizing", marks=pytest.mark.long
        ),
        pytest.param(Fault("finetune.model.build:load_base", action="SIGTERM"), id="loading"),
        pytest.param(Fault("mkdir", r"merged\.incomplete", action="SIGTERM SIGTERM"), id="merging"),
    ],
)
def test_sigterm_at_any_other_time_ends_at_once_in_143_and_the_command_can_be_given_again(job, fault: Fault) -> None:
    stopped = job(MERGED)
    assert "terminated" in stopped.ends(143, fault)
    if stopped.run.adapter.exists():
        assert not stopped.run.merged.exists()
        stopped.ends(0)
        assert stopped.run.is_merged


@pytest.mark.long
def test_sigint_twice_ends_at_once_with_nothing_corrupt(job, whole: Job) -> None:
    """In step 5 the save of step 4 may be under way; the one of step 2 has ended, as saves wait for each other."""
    stopped = job()
    assert "interrupted" in stopped.ends(130, Fault(STEP, nth=5, action="SIGINT SIGINT"))
    newest, refused = checkpoint.newest_valid(stopped.run)
    assert newest in (stopped.run.checkpoint(2), stopped.run.checkpoint(4))
    assert refused == {}
    stopped.ends(0)
    stopped.assert_as(whole)


def test_a_second_sigint_does_not_wait_for_the_save_under_way(job, whole: Job) -> None:
    """The save of step 2 is stopped for good at its first file."""
    stopped = job()
    fault = Fault("finetune.storage.checkpoint:_write", action="SIGINT hang SIGINT hang")
    assert "interrupted" in stopped.ends(130, fault)
    assert stopped.run.complete_checkpoints() == []
    stopped.ends(0)
    stopped.assert_as(whole)


def test_sigusr1_saves_a_checkpoint_and_training_goes_on(job, whole: Job) -> None:
    """Nor does the frequency of evaluation change the adapter."""
    asked = job([*JOB, "training.eval_every=null"])
    asked.ends(0, Fault(STEP, nth=3, action="SIGUSR1"))
    assert asked.run.saved_steps == [2, 3, 4, 6, 8, 9]
    assert asked.weights == whole.weights


# -- other processes --------------------------------------------------------------------------------------------------


def test_a_second_process_in_a_run_directory_is_refused_by_the_first_ones_number(job) -> None:
    first = job()
    stopped = first.start(Fault(STEP, nth=2, action="SIGSTOP"))
    stopped.wait_until_stopped()
    for more in ((), ("--fresh",)):
        assert f"in use by process {stopped.pid}" in first.ends(4, None, *more)
    stopped.send(signal.SIGKILL)
    assert stopped.wait().code == -signal.SIGKILL
    assert first.run.path.stat().st_mode & 0o077 == 0, "private to the user"


def test_another_micro_batch_goes_on_with_the_same_rows_and_is_logged(quick) -> None:
    """From a checkpoint of the version with transformers' schedules, too.

    Its functions of the schedule had a state, which says nothing; the rates follow from the step.
    """
    common = ["data.eval=none", "training.eval_every=null", "quantization.kind=none", "optimizer.kind=sgd",
              "adapter.targets=[q_proj]", "training.schedule=constant"]  # fmt: skip
    whole = finetune.train(quick(*common, run="whole")).run
    run = finetune.train(quick(*common, "training.max_steps=2", run="other")).run
    file = run.checkpoint(2) / "state.json"
    state = json.loads(file.read_text())
    state["schedule"]["lr_lambdas"] = [{} for _ in state["schedule"]["lr_lambdas"]]
    file.write_text(json.dumps(state))
    sign(run.checkpoint(2))
    finetune.train(quick(*common, "training.micro_batch=1", run="other"))
    (changed,) = [event for event in run.events() if event["event"] == "changed"]
    assert changed["config"]["training.micro_batch"] == [2, 1]
    assert changed["config"]["training.max_steps"] == [2, 4]
    torch.testing.assert_close(adapter_weights(run), adapter_weights(whole), rtol=1e-5, atol=1e-7)


def test_a_change_of_data_template_or_base_on_resume_is_refused_by_its_field(
    job, rows_file: Path, shallow_base: Path, tmp_path: Path
) -> None:
    """Rows, chat template and base weights, each changed in its file while the config stays as it is."""
    rows, template, base = (tmp_path / name for name in ("rows.jsonl", "template.jinja", "base"))
    shutil.copy(rows_file, rows)
    shutil.copy(shallow_base / "chat_template.jinja", template)
    shutil.copytree(shallow_base, base)
    killed = job([*JOB, f"data.train={rows}", f"model.name={base}", f"data.chat_template={template}"])
    killed.ends(-signal.SIGKILL, Fault(STEP, nth=4, once=str(killed.run.checkpoint(2))))
    before = killed.run.metrics_file.read_bytes()
    weights = base / "model.safetensors"
    another_training = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
    for file, changed, code, field in (
        (rows, rows.read_bytes().replace(b"Say 7", b"Say 8"), 3, "`data.train`"),
        (template, template.read_bytes() + b" ", 2, "`data.chat_template`"),
        (weights, save(another_training, {"format": "pt"}), 2, "`model.name`"),
    ):
        content = file.read_bytes()
        file.write_bytes(changed)
        assert field in killed.ends(code)
        file.write_bytes(content)
    assert killed.run.metrics_file.read_bytes() == before
    assert len(killed.run.saved_steps) == 1


def test_harmless_changes_since_a_checkpoint_are_returned(whole: Job) -> None:
    run = whole.run
    start = resume.find(run)
    now = checkpoint.manifest_of(run.complete_checkpoints()[-1])["made_with"]
    assert provenance.changes_since(run, start.checkpoint, now) == {}
    now["packages"]["torch"] = "9"
    now["processes"] = 2
    now["config"]["output"]["keep"] = 5
    found = provenance.changes_since(run, start.checkpoint, now)
    installed = importlib.metadata.version("torch")
    assert found == {"config": {"output.keep": [2, 5]}, "packages": {"torch": [installed, "9"]}, "processes": [1, 2]}
    now["data"]["eval"] = None
    with refusal(DataError, "`data.eval`"):
        provenance.changes_since(run, start.checkpoint, now)


# -- optimizer states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", optimizers.OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizers_state_comes_back_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    """Small weights have 32-bit states and large ones 8-bit ones; Adafactor's are not of the weights' type."""
    section = OptimizerSection(kind=kind, weight_decay=0.1)
    name, _ = optimizers.choose(section, "cpu")

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 3)).to(dtype)
        return model, optimizers.make(name, section, 1e-2, model)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step()

    model, optimizer = made()
    for seed in range(3):
        step(model, optimizer, seed)
    described, tensors = optimizer_states.read(optimizer)
    described, tensors = json.loads(json.dumps(described)), {key: tensor.clone() for key, tensor in tensors.items()}
    other, again = made()
    other.load_state_dict(model.state_dict())
    state.restore_optimizer(OneProcess(None, again), described, tensors)
    redescribed, retensors = optimizer_states.read(again)
    assert json.loads(json.dumps(redescribed)) == described
    assert all(torch.equal(retensors[key], tensor) and retensors[key].dtype == tensor.dtype
               for key, tensor in tensors.items())  # fmt: skip
    assert retensors.keys() == tensors.keys(), "what is shared is held once, as before"
    for seed in (5, 6):
        step(model, optimizer, seed)
        step(other, again, seed)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_a_state_of_another_job_is_refused() -> None:
    def stepped(rows: int) -> torch.optim.Optimizer:
        model = torch.nn.Linear(96, rows, bias=False)
        optimizer = optimizers.make("adamw_8bit", OptimizerSection(), 1e-2, model)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return optimizer

    small, large = stepped(48), stepped(64)
    with pytest.raises(ValueError, match="state1"):
        state.restore_optimizer(OneProcess(None, large), *optimizer_states.read(small))


def test_random_generators_come_back() -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.normal()), float(torch.randn(1)), random.random()]

    draw()
    state = json.loads(json.dumps(RandomState().as_json()))
    expected = draw()
    RandomState.from_json(state).restore()
    assert draw() == expected
