"""Kills, full and failing disks, damaged files, signals and a second process, around checkpoints and their resume.

Every fault is injected for real, in a process of its own: kills, a full tmpfs, kernel limits, flipped bits.
"""

from __future__ import annotations

import errno
import itertools
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import Children, Ended, Fault, contents
from jobs import adapter_weights, mounted
from messages import refusal
from safetensors.torch import load_file, save_file
from signed import sign

import finetune
from finetune.config import OptimizerSection
from finetune.errors import DataError
from finetune.lifecycle import provenance, resume
from finetune.model.distributed import optimizer_states
from finetune.model.distributed.engine import OneProcess
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

    def __init__(self, children: Children, rows_file: Path, folder: Path, job: list[str]) -> None:
        self.run = RunDirectory(folder)
        self.arguments = ["train", children.config, *job, f"data.train={rows_file}", f"output.dir={folder}"]
        self._children = children

    def go(self, fault: Fault | None = None, *more: str) -> Ended:
        return self._children.run([*self.arguments, *more], fault)

    def start(self, fault: Fault | None = None):
        return self._children.start(self.arguments, fault)

    @property
    def weights(self) -> bytes:
        return (self.run.adapter / "adapter_model.safetensors").read_bytes()

    def names(self) -> list[str]:
        return [event["event"] for event in self.run.events()]


@pytest.fixture
def job(children: Children, rows_file: Path, tmp_path: Path):
    """A function from overrides to a job in a directory of its own."""

    def make(overrides: list[str] = JOB, folder: Path = tmp_path / "run") -> Job:
        return Job(children, rows_file, folder, overrides)

    return make


@pytest.fixture(scope="module")
def whole(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The uninterrupted run. Do not write to it."""
    job = Job(children, rows_file, tmp_path_factory.mktemp("whole") / "run", JOB)
    ended = job.go()
    assert ended.code == 0, ended.output
    return job


# A learning rate at which the held-out loss soon rises, so that the run stops early.
EARLY = [*JOB, "training.max_steps=30", "training.eval_every=1", "training.early_stopping=2",
         "training.learning_rate=0.5", "training.schedule=constant", "output.best=false"]  # fmt: skip


@pytest.fixture(scope="module")
def whole_early(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The uninterrupted run that stops early. Do not write to it."""
    job = Job(children, rows_file, tmp_path_factory.mktemp("early") / "run", EARLY)
    ended = job.go()
    assert ended.code == 0, ended.output
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
    ended = killed.go()
    assert ended.code == 0, ended.output
    assert killed.weights == whole.weights
    assert [line["step"] for line in killed.run.metrics() if "loss" in line] == list(range(1, STEPS + 1))
    assert [event["step"] for event in killed.run.events() if event["event"] == "resumed"] == [2, 2, 6]
    assert not list(killed.run.path.rglob("*.incomplete"))


# -- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["adapter", "b", "state", "manifest", "latest"])
def test_a_disk_that_fills_during_a_save_ends_in_4_with_the_bytes(
    children: Children, small_disk: Path, file: str
) -> None:
    run = made(small_disk / "run")
    checkpoint.write(run, contents(1))
    ended = children.run(["save", run.path, 2], Fault("open", f"checkpoints/.*{file}", action="fill"))
    assert ended.code == 4, ended.output
    message = (
        r"checkpoints/latest could not be written: No space left on device; [\d,]+ bytes are free"
        if file == "latest"  # the checkpoint itself is published by then
        else r"checkpoint at step 2 could not be written to .*No space left on device; [\d,]+ bytes are "
        r"free; [\d,]+ bytes are needed\. Earlier checkpoints are untouched: free some space"
    )
    assert re.search(message, ended.output)
    newest, damaged = checkpoint.newest_valid(run)
    assert newest in (run.checkpoint(1), run.checkpoint(2) if file == "latest" else None)
    assert not damaged
    (small_disk / "filler").unlink()
    assert children.run(["save", run.path, 2]).code == 0


def test_a_training_on_a_full_disk_ends_in_4_and_goes_on_when_there_is_room(job, whole: Job, small_disk: Path) -> None:
    """First the save finds the room gone before it writes, then a line of metrics is what does not fit."""
    starved = job(folder=small_disk / "run")
    ended = starved.go(Fault("rename", "step-00000002.incomplete", action="fill"))
    assert ended.code == 4, ended.output
    assert re.search(r"could not be written: No space left on device; [\d,]+ bytes are free", ended.output)
    assert "Traceback" not in ended.output
    assert starved.run.complete_checkpoints() == [starved.run.checkpoint(2)]
    # Room for lines, not for a checkpoint.
    (small_disk / "filler").unlink()
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**20))
    ended = starved.go()
    assert ended.code == 4, ended.output
    assert re.search(r"checkpoint at step \d could not be written.* not enough disk space; [\d,]+ bytes are free; "
                     r"[\d,]+ bytes are needed\. ", ended.output)  # fmt: skip
    (small_disk / "filler").unlink()
    assert starved.go().code == 0
    assert starved.weights == whole.weights


FAILED_SAVES = {
    **{
        event: (Fault(event, "step-00000002.incomplete", action=errno.EIO), "Input/output error")
        for event in ("open", "fsync", "rename", "mkdir")
    },
    "size": (Fault(file_bytes=2048), "File too large"),
    "bits": (Fault("read", "adapter.safetensors", action="flip"), "reads back differently than it was written"),
}
"""Faults of a disk, and what is said of them."""


@pytest.mark.parametrize("name", FAILED_SAVES)
def test_a_save_that_fails_ends_in_4_with_the_checkpoint_before(children: Children, tmp_path: Path, name: str) -> None:
    fault, said = FAILED_SAVES[name]
    run = made(tmp_path / "run")
    checkpoint.write(run, contents(1))
    ended = children.run(["save", run.path, 2], fault)
    assert ended.code == 4
    assert said in ended.in_one_line
    assert checkpoint.newest_valid(run) == (run.checkpoint(1), {})


def test_a_directory_that_turned_read_only_or_vanished_ends_in_4(children: Children, small_disk: Path) -> None:
    run = made(small_disk / "run")
    checkpoint.write(run, contents(1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    ended = children.run(["save", run.path, 2])
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert ended.code == 4
    assert "Read-only file system; 1,0" in ended.output
    assert "make its file system writable" in ended.output
    assert "free some space" not in ended.output
    assert checkpoint.newest_valid(run) == (run.checkpoint(1), {})
    (small_disk / "file").write_text("")
    ended = children.run(["save", small_disk / "file" / "run", 2])
    assert ended.code == 4
    assert "Not a directory" in ended.output
    ended = children.run(["save", small_disk / "gone", 2])
    assert ended.code == 4
    assert "No such file or directory" in ended.output
    assert not (small_disk / "gone").exists()


def test_a_run_directory_that_vanishes_while_training_ends_in_4(job) -> None:
    orphan = job()
    child = orphan.start(Fault(STEP, nth=3, action="SIGSTOP"))
    child.wait_until_stopped()
    shutil.rmtree(orphan.run.path)
    child.send(signal.SIGCONT)
    ended = child.wait()
    assert ended.code == 4, ended.output
    assert "could not be written: No such file or directory" in " ".join(ended.output.split())
    assert "Traceback" not in ended.output


def test_a_disk_full_at_the_merge_leaves_the_adapter_and_a_merge_that_can_be_done_again(job, small_disk: Path) -> None:
    merging = job([*JOB, "output.merge=true", "training.max_steps=1", "data.eval=none", "training.eval_every=null"],
                  small_disk / "run")  # fmt: skip
    ended = merging.go(Fault("mkdir", r"merged\.incomplete", action="fill"))
    assert ended.code == 4, ended.output
    assert "the adapter is safe in" in ended.output
    adapter = merging.weights
    assert not merging.run.merged.exists()
    (small_disk / "filler").unlink()
    ended = merging._children.run(["merge", merging.run.path])
    assert ended.code == 0, ended.output
    assert (merging.run.merged / "merge.json").is_file()
    assert merging.weights == adapter


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(whole: Job, tmp_path: Path) -> RunDirectory:
    """A copy of the run as a kill after its last checkpoint leaves it; to be damaged."""
    run = RunDirectory(shutil.copytree(whole.run.path, tmp_path / "run"))
    shutil.rmtree(run.adapter)
    write_lines(run.events_file, [event for event in run.events() if event["event"] not in ("trained", "finished")])
    return run


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FILES = ["adapter_config.json", "adapter_model.safetensors", "manifest.json", "optimizer.safetensors", "state.json",
         "trainer_state.json"]  # fmt: skip


def test_a_run_falls_back_to_the_newest_whole_checkpoint_and_says_so(job, whole: Job, damaged: RunDirectory) -> None:
    older, newest = damaged.complete_checkpoints()
    assert files_of(newest) == FILES
    file = newest / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = job(folder=damaged.path)
    ended = again.go()
    assert ended.code == 0, ended.output
    said = " ".join(ended.output.split())
    assert f"{newest.name} cannot be used (optimizer.safetensors is damaged" in said
    assert re.search(rf"resuming from .*{older.name}", said)
    assert newest.with_name(newest.name + ".damaged").is_dir(), "nothing is deleted silently"
    assert again.weights == whole.weights
    (event,) = [event for event in damaged.events() if event["event"] == "checkpoint_damaged"]
    assert (event["step"], event["moved_to"]) == (STEPS, newest.name + ".damaged")


@pytest.mark.parametrize("how", ["no file", "no checkpoint", "a flag"])
def test_without_a_whole_checkpoint_a_run_ends_in_7_and_never_starts_over(job, damaged: RunDirectory, how: str) -> None:
    for folder in damaged.complete_checkpoints():
        if how == "no checkpoint":
            shutil.rmtree(folder)
        else:
            (folder / "state.json").unlink()
    before = damaged.metrics_file.read_bytes()
    again = job(folder=damaged.path)
    for _ in range(2 if how == "a flag" else 1):
        ended = again.go()
        assert ended.code == 7, ended.output
        assert "no checkpoint in" in ended.output
        assert ("state.json is missing" in ended.output) == (how != "no checkpoint")
    assert damaged.metrics_file.read_bytes() == before
    if how == "a flag":
        assert again.go(None, "training.max_steps=1", "--fresh").code == 0
        assert damaged.path.with_name("run.1").is_dir()


def test_a_checkpoint_with_weights_that_are_not_finite_is_not_written(tmp_path: Path) -> None:
    from finetune.errors import NumbersError

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
        pytest.param(Fault("open", r"step-00000004\.incomplete/opt", action="SIGTERM"), 5, id="save"),
        pytest.param(Fault(EVALUATION, nth=3, action="SIGTERM"), 4, id="evaluation"),
        pytest.param(Fault(STEP, nth=STEPS, action="SIGTERM"), STEPS, id="last step", marks=pytest.mark.long),
        pytest.param(Fault(EVALUATION, nth=5, action="SIGTERM"), STEPS, id="last evaluation"),
    ],
)
def test_sigterm_in_training_saves_ends_in_143_and_a_resume_ends_with_the_same_bits(
    job, whole: Job, fault: Fault, saved: int
) -> None:
    stopped = job()
    ended = stopped.go(fault)
    assert ended.code == 143, ended.output
    assert f"step {saved} is saved" in " ".join(ended.output.split())
    assert stopped.run.complete_checkpoints()[-1] == stopped.run.checkpoint(saved)
    assert stopped.names()[-1] == "terminated"
    assert stopped.go().code == 0
    assert stopped.weights == whole.weights
    assert evaluations(stopped.run) == evaluations(whole.run)


def test_sigterm_in_the_evaluation_that_ends_a_run_early_adds_no_step(job, whole_early: Job) -> None:
    last = whole_early.run.steps_done
    stopped = job(EARLY)
    assert stopped.go(Fault(EVALUATION, nth=2 + last, action="SIGTERM")).code == 143
    assert stopped.run.complete_checkpoints()[-1] == stopped.run.checkpoint(last)
    assert len(evaluations(stopped.run)) == len(evaluations(whole_early.run)) - 1
    assert stopped.go().code == 0
    assert evaluations(stopped.run) == evaluations(whole_early.run)
    assert stopped.weights == whole_early.weights


@pytest.mark.parametrize(
    ("moment", "before_training"),
    [
        pytest.param("finetune.training.progress:Progress.gains", 0, id="before it is counted", marks=pytest.mark.long),
        pytest.param("finetune.training.recorder:MetricsRecorder.evaluated", 1, id="before it is written"),
        pytest.param(
            "finetune.report.terminal:Terminal.evaluated", 1, id="after it was written", marks=pytest.mark.long
        ),
    ],
)
def test_sigterm_once_the_held_out_loss_is_known_ends_with_that_evaluation_counted_once(
    job, whole_early: Job, moment: str, before_training: int
) -> None:
    """In the first evaluation without a gain of a run that the second one ends: counted twice, it would end there.

    `before_training`: how often the moment comes in the evaluation before the first step, which is counted by nobody.
    """
    last = whole_early.run.steps_done
    losses = [loss for _, loss in evaluations(whole_early.run)]
    assert losses[last - 1] >= min(losses[1 : last - 1]), "the evaluation before the last one has no gain"
    stopped = job(EARLY)
    assert stopped.go(Fault(moment, nth=last - 1 + before_training, action="SIGTERM")).code == 143
    assert stopped.run.complete_checkpoints()[-1] == stopped.run.checkpoint(last - 1)
    assert evaluations(stopped.run) == evaluations(whole_early.run)[:last]
    assert stopped.go().code == 0
    assert evaluations(stopped.run) == evaluations(whole_early.run)
    assert stopped.weights == whole_early.weights


def test_a_postponed_evaluation_is_logged_once_even_after_a_kill(job, whole: Job) -> None:
    stopped = job()
    assert stopped.go(Fault(EVALUATION, nth=3, action="SIGTERM")).code == 143
    assert stopped.go(Fault("finetune.report.terminal:Terminal.evaluated")).code == -signal.SIGKILL
    assert evaluations(stopped.run) == evaluations(whole.run)[:2]
    assert stopped.go().code == 0
    assert evaluations(stopped.run) == evaluations(whole.run)
    assert stopped.weights == whole.weights


def evaluations(run: RunDirectory) -> list[tuple[int, float]]:
    return [(line["step"], line["eval_loss"]) for line in run.metrics() if "eval_loss" in line]


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
    stopped = job(["training.max_steps=1", "quantization.kind=none", "output.merge=true", "data.eval=none",
                   "training.eval_every=null", "memory.check=off"])  # fmt: skip
    ended = stopped.go(fault)
    assert ended.code == 143, ended.output
    assert "terminated" in ended.output
    assert "Traceback" not in ended.output
    if stopped.run.adapter.exists():
        assert not stopped.run.merged.exists()
        assert stopped.go().code == 0
        assert (stopped.run.merged / "merge.json").is_file()


def test_sigint_once_ends_after_a_save(job, whole: Job) -> None:
    stopped = job()
    ended = stopped.go(Fault(STEP, nth=3, action="SIGINT"))
    assert ended.code == 130, ended.output
    assert "interrupted" in ended.output
    assert checkpoint.newest_valid(stopped.run) == (stopped.run.checkpoint(3), {})
    assert stopped.go().code == 0
    assert stopped.weights == whole.weights


def test_sigint_twice_ends_at_once_with_nothing_corrupt(job, whole: Job) -> None:
    """In step 5 the save of step 4 may be under way; the one of step 2 has ended, as saves wait for each other."""
    stopped = job()
    ended = stopped.go(Fault(STEP, nth=5, action="SIGINT SIGINT"))
    assert ended.code == 130, ended.output
    assert "interrupted" in ended.output
    newest, refused = checkpoint.newest_valid(stopped.run)
    assert newest in (stopped.run.checkpoint(2), stopped.run.checkpoint(4))
    assert refused == {}
    assert stopped.go().code == 0
    assert stopped.weights == whole.weights


def test_a_second_sigint_does_not_wait_for_the_save_under_way(job, whole: Job) -> None:
    """The save of step 2 is stopped for good at its first file."""
    stopped = job()
    ended = stopped.go(Fault("finetune.storage.checkpoint:_write", action="SIGINT hang SIGINT hang"))
    assert ended.code == 130, ended.output
    assert stopped.run.complete_checkpoints() == []
    assert stopped.go().code == 0
    assert stopped.weights == whole.weights


def test_sigusr1_saves_a_checkpoint_and_training_goes_on(job, whole: Job) -> None:
    """Nor does the frequency of evaluation change the adapter."""
    asked = job([*JOB, "training.eval_every=null"])
    assert asked.go(Fault(STEP, nth=3, action="SIGUSR1")).code == 0
    assert asked.run.saved_steps == [2, 3, 4, 6, 8, 9]
    assert asked.weights == whole.weights


# -- other processes --------------------------------------------------------------------------------------------------


def test_a_second_process_in_a_run_directory_is_refused_by_the_first_ones_number(job) -> None:
    first = job()
    stopped = first.start(Fault(STEP, nth=2, action="SIGSTOP"))
    stopped.wait_until_stopped()
    for more in ((), ("--fresh",)):
        ended = first.go(None, *more)
        assert ended.code == 4
        assert f"in use by process {stopped.pid}" in ended.output
    stopped.send(signal.SIGKILL)
    assert stopped.wait().code == -signal.SIGKILL
    assert first.run.path.stat().st_mode & 0o077 == 0, "private to the user"


def test_another_micro_batch_goes_on_with_the_same_rows_and_is_logged(quick) -> None:
    common = ["data.eval=none", "training.eval_every=null", "quantization.kind=none", "optimizer.kind=sgd",
              "adapter.targets=[q_proj]", "training.schedule=constant"]  # fmt: skip
    whole = finetune.train(quick(*common, run="whole")).run
    run = finetune.train(quick(*common, "training.max_steps=2", run="other")).run
    finetune.train(quick(*common, "training.micro_batch=1", run="other"))
    (changed,) = [event for event in run.events() if event["event"] == "changed"]
    assert changed["config"]["training.micro_batch"] == [2, 1]
    assert changed["config"]["training.max_steps"] == [2, 4]
    torch.testing.assert_close(adapter_weights(run), adapter_weights(whole), rtol=1e-5, atol=1e-7)


def test_a_change_of_data_template_or_base_on_resume_is_refused_by_its_field(
    children: Children, rows_file: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """Rows, chat template and base weights, each changed in its file while the config stays as it is."""
    rows, template, base = (Path(tmp_path / name) for name in ("rows.jsonl", "template.jinja", "base"))
    shutil.copy(rows_file, rows)
    shutil.copy(tiny_base / "chat_template.jinja", template)
    shutil.copytree(tiny_base, base)
    overrides = [*JOB, f"model.name={base}", f"data.chat_template={template}"]
    job = Job(children, rows, tmp_path / "run", overrides)
    assert job.go(Fault(STEP, nth=4, once=str(job.run.checkpoint(2)))).code == -signal.SIGKILL
    before = job.run.metrics_file.read_bytes()
    weights = base / "model.safetensors"
    for file, changed, code, field in (
        (rows, rows.read_bytes().replace(b"Say 7", b"Say 8"), 3, "`data.train`"),
        (template, template.read_bytes() + b" ", 2, "`data.chat_template`"),
        (weights, other_weights(weights, tmp_path), 2, "`model.name`"),
    ):
        content = file.read_bytes()
        file.write_bytes(changed)
        ended = job.go()
        assert (ended.code, field in ended.output) == (code, True), ended.output
        file.write_bytes(content)
    assert job.run.metrics_file.read_bytes() == before
    assert len(job.run.saved_steps) == 1


def other_weights(file: Path, folder: Path) -> bytes:
    """Another training of the same base."""
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, folder / "other", {"format": "pt"})
    return (folder / "other").read_bytes()


def test_harmless_changes_since_a_checkpoint_are_returned(whole: Job) -> None:
    run = whole.run
    start = resume.find(run)
    now = checkpoint.manifest_of(run.complete_checkpoints()[-1])["made_with"]
    assert provenance.changes_since(run, start.checkpoint, now) == {}
    now["packages"]["torch"] = "9"
    now["processes"] = 2
    now["config"]["output"]["keep"] = 5
    found = provenance.changes_since(run, start.checkpoint, now)
    assert found == {
        "config": {"output.keep": [2, 5]}, "packages": {"torch": [torch.__version__, "9"]}, "processes": [1, 2],
    }  # fmt: skip
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


def test_a_state_of_another_job_is_refused(tmp_path: Path) -> None:
    def stepped(rows: int) -> torch.optim.Optimizer:
        model = torch.nn.Linear(96, rows, bias=False)
        optimizer = optimizers.make("adamw_8bit", OptimizerSection(), 1e-2, model)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return optimizer

    small, large = stepped(48), stepped(64)
    with pytest.raises(ValueError, match="state1"):
        state.restore_optimizer(OneProcess(None, large), *optimizer_states.read(small))


def test_random_generators_come_back(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.normal()), float(torch.randn(1)), random.random()]

    draw()
    state = json.loads(json.dumps(RandomState().as_json()))
    expected = draw()
    RandomState.from_json(state).restore()
    assert draw() == expected


def test_a_checkpoint_of_the_version_with_transformers_schedules_goes_on(quick) -> None:
    """Its functions of the schedule had a state, which says nothing; the rates follow from the step."""
    run = finetune.train(quick("training.max_steps=2")).run
    file = run.checkpoint(2) / "state.json"
    state = json.loads(file.read_text())
    state["schedule"]["lr_lambdas"] = [{} for _ in state["schedule"]["lr_lambdas"]]
    file.write_text(json.dumps(state))
    sign(run.checkpoint(2))
    finetune.train(quick("training.max_steps=3"))
    assert run.steps_done == 3
