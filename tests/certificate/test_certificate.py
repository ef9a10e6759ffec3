"""The certificate of a device: each way in which a trial may fail ends as one line, and a training that is right."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import html
import io
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from jobs import TINY, metric, sampled

import finetune
from finetune.certificate import child, making, small_model, store, trials, verdict
from finetune.config import Config
from finetune.doctor import machine
from finetune.forecast import devices, planning, traced_step
from finetune.kernels import ops
from finetune.lifecycle import certification
from finetune.model.base import load_architecture
from finetune.runtime import libraries
from finetune.settings import load_config
from finetune.storage import private
from finetune.storage.records import TrialResult
from finetune.storage.rundir import RunDirectory

JOB = ("training.max_steps=2", "kernels.fused=auto", "kernels.certificate=on")
KEPT = ("mlp", "norm", "model")
"""The trials of these tests: one that is to fail, one after it, and the model that is trained without the first."""

Program = Callable[..., Any]


class Forked:
    """The child as a fork of this process, with the kernels that a test put into it."""

    def __init__(self, request: dict[str, Any]) -> None:
        read, write = os.pipe()
        self.results, self.printed = os.fdopen(read, "rb", buffering=0), tempfile.TemporaryFile()  # noqa: SIM115
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        code = 1
        try:
            torch.set_num_threads(1)
            faulthandler.disable()
            os.dup2(self.printed.fileno(), 2)
            child.main(write, json.loads(json.dumps(request)))
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of trials: a second passes between two looks at it, and what a test adds to `now`."""
    clock = SimpleNamespace(now=0.0)

    def perf_counter() -> float:
        clock.now += 1
        return clock.now

    monkeypatch.setattr(small_model, "time", SimpleNamespace(perf_counter=perf_counter))
    return clock


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, tmp_path: Path) -> None:
    """Few trials of few tokens in a fork, a cache of its own, and only the hang runs into a limit."""
    kept = {name: dataclasses.replace(trials.TRIALS[name], limit_seconds=300.0) for name in KEPT}
    monkeypatch.setattr(making, "start", Forked)
    monkeypatch.setattr(making, "_LIMIT_SECONDS", 600.0)
    monkeypatch.setattr(trials, "_COMPARED", ((1, 16), (3, 17)))
    monkeypatch.setattr(verdict, "_LEAST_TOKENS", 32)
    for name in set(trials.TRIALS) - set(KEPT):
        monkeypatch.delitem(trials.TRIALS, name)
    for name, trial in kept.items():
        monkeypatch.setitem(trials.TRIALS, name, trial)
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "cache")


# -- kernels that fail -------------------------------------------------------------------------------------------------


def wrong_element(plain: Program, clock: Any) -> Program:
    def program(*args: Any, **named: Any) -> Any:
        result = plain(*args, **named)
        result.view(-1)[result.numel() // 2] += 1
        return result

    return program


def writes_beside(plain: Program, clock: Any) -> Program:
    def program(*args: Any, **named: Any) -> Any:
        result = plain(*args, **named)
        beside = (result.storage_offset() + result.numel() + 1) * result.element_size()
        if result.untyped_storage().nbytes() >= beside:
            result.as_strided((1,), (1,), result.storage_offset() + result.numel()).zero_()
        return result

    return program


def another_result(plain: Program, clock: Any) -> Program:
    calls = iter(range(10**9))
    return lambda *args, **named: plain(*args, **named) * (1 + 1e-6 * (next(calls) % 2))


def slower(plain: Program, clock: Any) -> Program:
    def program(*args: Any, **named: Any) -> Any:
        clock.now += 1
        return plain(*args, **named)

    return program


def ends(how: Callable[[], object]) -> Callable[[Program, Any], Program]:
    return lambda plain, clock: lambda *args, **named: how()


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


FAULTS: dict[str, tuple[Callable[[Program, Any], Program], str]] = {
    "one wrong element": (wrong_element, "`gated` computes 1 of "),
    "a write beside the result": (writes_beside, "`gated` writes beside its result"),
    "another result the second time": (another_result, "`gated` gives another result the second time"),
    "slower": (slower, "times as long"),
    "SIGSEGV": (ends(lambda: os.kill(os.getpid(), signal.SIGSEGV)), "its process ended (signal 11"),
    "exit": (ends(lambda: os._exit(1)), "its process ended (exit code 1"),
    "a hang": (ends(lambda: time.sleep(3600)), "it was not done after"),
    "out of memory": (ends(raising(torch.OutOfMemoryError("CUDA out of memory."))), "it ran out of memory"),
    "an error": (ends(raising(RuntimeError("no such kernel"))), "it raised RuntimeError: no such kernel"),
}


@pytest.fixture(scope="module")
def trained() -> list[float]:
    """The losses by the plain path, once a test has trained it."""
    return []


@pytest.fixture
def expected(quick, trained) -> list[float]:
    """The losses by the plain path."""
    if not trained:
        trained += metric(finetune.train(quick("training.max_steps=2", "kernels.fused=off", run="plain")).run, "loss")
    return trained


TRAINED = ("one wrong element", "SIGSEGV", "a hang")
"""Those after which a job is trained as well: a result that differs, a process that ends, and one that does not."""


@pytest.fixture
def reason(fault: str, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> str:
    """What is said of `fault`, which a kernel has from now on."""
    replaced, reason = FAULTS[fault]
    if fault == "a hang":
        monkeypatch.setitem(trials.TRIALS, "mlp", dataclasses.replace(trials.TRIALS["mlp"], limit_seconds=1.0))
    monkeypatch.setitem(ops.ON_CPU, "finetune::gated", replaced(ops.ON_CPU["finetune::gated"], clock))
    monkeypatch.setattr(ops, "gated", replaced(ops.gated, clock))  # in this process as well: it must not be called
    return reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    sampled(
        [fault for fault in FAULTS if fault not in TRAINED], "a write beside the result",
        "another result the second time", "slower", "out of memory",
    ),
)  # fmt: skip
def test_a_kernel_that_fails_is_off_with_one_line(fault, reason) -> None:
    made = verdict.obtain(requested(), print, str)
    assert made.kernels_off == {"mlp"}, "the others hold, and the model without it"
    (line,) = made.lines(load_config(TINY, []))
    assert line.startswith("certificate: kernel `mlp` is off: ")
    assert reason in line


@pytest.mark.slow
@pytest.mark.parametrize("fault", sampled(TRAINED, "one wrong element", "a hang"))
def test_without_a_kernel_that_fails_the_training_is_right(fault, expected, reason, quick, capsys) -> None:
    capsys.readouterr()
    losses = metric(finetune.train(quick(*JOB)).run, "loss")
    printed = " ".join("".join(capsys.readouterr()).split())
    (line,) = re.findall(r"certificate: (.*? is off: .*?; .*?time)", printed)
    assert line.startswith("kernel `mlp` is off: ")
    assert reason in line
    assert "kernels: fused" in printed, "the others"
    assert losses == pytest.approx(expected, rel=1e-5)
    report = html.unescape(RunDirectory(quick(*JOB).output.dir).report_file.read_text())
    assert "tried on the device" in report
    assert "mlp is off (" in report


# -- what is kept ------------------------------------------------------------------------------------------------------

RESULTS = [
    TrialResult("norm", "held", "", {"seconds": 1.0}),
    TrialResult("mlp", "failed", "one element differs"),
    TrialResult("model", "held"),
]


def requested(**changes: Any) -> dict[str, Any]:
    config: Config = load_config(TINY, ["kernels.fused=auto"])
    given = verdict.request(config, load_architecture(config.model), "sdpa", torch.device("cpu"), 2, 13)
    return {**given, **changes}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests that were tried; each has the same results."""
    seen: list[dict[str, Any]] = []

    def make(request: dict[str, Any], *given: Any, complete: bool = False) -> list[TrialResult]:
        seen.append(request)
        return RESULTS

    monkeypatch.setattr(making, "make", make)
    return seen


def obtained(request: dict[str, Any], **named: Any) -> tuple[list[TrialResult], list[str]]:
    notes: list[str] = []
    return list(verdict.obtain(request, notes.append, lambda tries: None, **named).results), notes


def test_results_are_kept_for_a_device_and_a_kind_of_job(made) -> None:
    for request in (requested(), requested(), requested(free_bytes=5), requested(tokens=29), requested(rows=1)):
        assert obtained(request) == (RESULTS, [])
    assert [(one["rows"], one["tokens"]) for one in made] == [(2, 13), (2, 29), (1, 13)]
    assert obtained(requested(), anew=True) == (RESULTS, [])
    assert len(made) == 4
    (file, *_) = (store.cache_folder() / "certificates").iterdir()
    assert file.stat().st_mode & 0o077 == 0


def _other_job(file: Path) -> None:
    record = json.loads(file.read_text())
    record["made_for"]["device"]["name"] = "another"
    file.write_text(json.dumps(record))


FORGED: dict[str, Callable[[Path], object]] = {
    "cut off": lambda file: file.write_text(file.read_text()[:100]),
    "other values": lambda file: file.write_text(file.read_text().replace('"held"', '"praised"')),
    "another device's": _other_job,
    "others can write it": lambda file: file.chmod(0o666),
    "others can write its folder": lambda file: file.parent.chmod(0o777),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_damaged_or_forged_certificate_is_made_anew(how, made) -> None:
    obtained(requested())
    (file,) = (store.cache_folder() / "certificates").iterdir()
    FORGED[how](file)
    results, _ = obtained(requested())
    assert results == RESULTS
    assert len(made) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_cache_that_cannot_be_written_is_one_line_and_the_results_are_used(number, made, monkeypatch) -> None:
    def refuse(**named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(private, "tempfile", SimpleNamespace(TemporaryDirectory=refuse))
    results, (note,) = obtained(requested())
    assert results == RESULTS
    assert os.strerror(number) in note
    assert "\n" not in note


def test_trials_that_could_not_begin_are_a_reason_and_not_kept(monkeypatch) -> None:
    def fail(request: dict[str, Any]) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(making, "start", fail)
    results, notes = obtained(requested())
    assert {(one.status, one.reason) for one in results} == {
        ("failed", "no process could be started for it: Resource temporarily unavailable")
    }
    assert notes == []
    assert store.read(store.made_for(requested())) is None


class Ended:
    """A child that has ended with `returncode`, after it began a trial and, unless None, wrote a result."""

    def __init__(self, returncode: int, trial: str, result: dict[str, Any] | None) -> None:
        self.returncode, self.printed, self.results = returncode, io.BytesIO(), io.BytesIO()
        self.lines = [{"began": trial}] if trial else []
        self.lines += [{"trial": trial, **result}] if result else []

    def kill(self) -> None: ...

    def wait(self) -> int:
        return self.returncode


OUT_OF_MEMORY = {"status": "failed", "reason": "it ran out of memory", "transient": True}
MOMENTARY: dict[str, Callable[[], Ended]] = {
    "memory that others hold": lambda: Ended(0, "mlp", OUT_OF_MEMORY),
    "the out-of-memory killer": lambda: Ended(-signal.SIGKILL, "mlp", None),
    "a child that does not begin": lambda: Ended(1, "", None),
}


@pytest.mark.parametrize("why", MOMENTARY)
def test_a_passing_failure_is_reported_and_tried_again_at_the_next_start(why, monkeypatch) -> None:
    tried: list[str] = []

    def start(request: dict[str, Any]) -> Ended:
        tried.append(request["trials"][0])
        return MOMENTARY[why]() if tried == ["norm", "mlp"] else Ended(0, tried[-1], {"status": "held"})

    monkeypatch.setattr(making, "start", start)
    monkeypatch.setattr(making, "_lines", lambda child, until: iter(child.lines))
    first = verdict.obtain(requested(), print, str)
    assert first.failed("mlp")
    (line, *_) = first.lines(load_config(TINY, []).fused)
    assert line.endswith("it is tried again at the next start")
    del tried[:]
    assert not verdict.obtain(requested(), print, str).kernels_off
    assert tried == ["mlp", "model"], "what held alone is not tried again, and the model with the kernel"
    assert verdict.obtain(requested(), print, str).results == verdict.standing(requested()).results
    assert tried == ["mlp", "model"]


@pytest.mark.parametrize(("free", "load", "transient"), [(23, 0.5, False), (12, 0.5, True), (23, 1000.0, True)])
def test_a_trial_that_takes_too_long_is_a_verdict_on_a_device_that_nothing_else_uses(
    free, load, transient, monkeypatch
) -> None:
    def lines(child: Ended, until: Any) -> Iterator[dict[str, Any]]:
        yield from child.lines
        raise TimeoutError

    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(making, "start", lambda request: Ended(0, request["trials"][0], None))
    monkeypatch.setattr(making, "_lines", lines)
    for result in making.make(requested(free_bytes=free, total_bytes=24), str):
        assert (result.status, result.transient) == ("failed", transient)


def test_secrets_do_not_reach_the_child(monkeypatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_PROFILE", "my_secret", "HTTPS_PROXY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "value")
    passed: dict[str, str] = {}
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda self, *args, env, **named: passed.update(env))
    made = making.Child({})
    made.results.close()
    made.printed.close()
    assert {"HF_TOKEN", "WANDB_API_KEY", "AWS_PROFILE", "my_secret", "HTTPS_PROXY"}.isdisjoint(passed)
    assert {"PATH", "TOKENIZERS_PARALLELISM"} <= passed.keys()


def _full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(private, "tempfile", SimpleNamespace(TemporaryDirectory=refuse))


def _forge() -> None:
    """Make every certificate of the cache one that others could have written, in which nothing holds."""
    for file in (store.cache_folder() / "certificates").iterdir():
        file.write_text(file.read_text().replace('"held"', '"failed"').replace("one element differs", "it is forged"))
        file.chmod(0o666)


CACHES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int]] = {
    "full": (_full, 2),
    "forged": (lambda monkeypatch: _forge(), 2),
    "as it was left": (lambda monkeypatch: None, 1),
}
"""What happens to a cache after a run, and how often the trials are then made in two."""


@pytest.mark.slow
@pytest.mark.parametrize("cache", sampled(CACHES, "forged", "as it was left"))
def test_a_run_prints_in_one_line_what_is_off_and_is_right_whatever_its_cache_holds(
    cache, quick, made, capsys, monkeypatch, expected
) -> None:
    happens, times = CACHES[cache]
    if cache == "full":
        happens(monkeypatch)
    for run in ("first", "second"):
        capsys.readouterr()
        losses = metric(finetune.train(quick(*JOB, run=run)).run, "loss")
        printed = " ".join("".join(capsys.readouterr()).split())
        (line,) = re.findall(r"certificate: (kernel.*? is off: .*?);", printed)
        assert line == "kernel `mlp` is off: one element differs"
        assert printed.count("certificate: the results are used for this run and not kept") == (cache == "full")
        assert losses == pytest.approx(expected, rel=1e-5)
        happens(monkeypatch)
    assert len(made) == times


@pytest.mark.slow
def test_two_runs_that_begin_at_once_are_both_right(quick, tmp_path, monkeypatch, expected) -> None:
    log = tmp_path / "made"

    def make(request: dict[str, Any], *given: Any, complete: bool = False) -> list[TrialResult]:
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(0.5)  # in which the other one comes
        return RESULTS

    monkeypatch.setattr(making, "make", make)
    pids = []
    for run in ("one", "other"):
        pids.append(os.fork())
        if not pids[-1]:
            code = 1
            with contextlib.suppress(BaseException):
                losses = metric(finetune.train(quick(*JOB, run=run)).run, "loss")
                code = int(losses != pytest.approx(expected, rel=1e-5))
            os._exit(code)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert log.read_text() == "made\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_local_main", [True, False])
def test_one_rank_of_each_machine_tries_and_all_take_its_word(
    is_local_main, quick, made, capsys, monkeypatch, expected
) -> None:
    def gathered(own: Any) -> list[Any]:
        """Of the ranks of two machines, this one first."""
        assert own == (tuple(RESULTS) if is_local_main else None)
        return [own, None, (TrialResult("norm", "failed", "it is another card"),), None]

    ranks = SimpleNamespace(is_local_main=lambda: is_local_main, gathered=gathered)
    monkeypatch.setattr(certification, "ranks", ranks)
    losses = metric(finetune.train(quick(*JOB)).run, "loss")
    printed = " ".join("".join(capsys.readouterr()).split())
    off = re.findall(r"certificate: kernel `(\w+)` is off", printed)
    assert off == (["mlp", "norm"] if is_local_main else ["norm"])
    assert len(made) == is_local_main
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_child_ends_with_its_parent() -> None:
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        grandchild = os.fork()
        if not grandchild:
            child._end_with(os.getppid())
            os.write(write, b"began")
            time.sleep(3600)
            os._exit(0)
        time.sleep(3600)
        os._exit(0)
    os.close(write)
    assert os.read(read, 20)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert select.select([read], [], [], 600)[0], "nobody has its end of the pipe any more"
    assert os.read(read, 20) == b""
    os.close(read)


# -- what follows ------------------------------------------------------------------------------------------------------


def test_what_failed_is_taken_out_of_the_job_and_of_its_plan() -> None:
    failed = [TrialResult(name, "failed", "it differs") for name in ("optimizer", "attention_implementation", "lora")]
    certificate, tiny = verdict.Certificate(failed), load_config(TINY, [])
    assert certificate.changes(tiny, "cuda") == {"optimizer.kind": "adamw_8bit", "model.attention": "eager"}
    packed = load_config(TINY, ["data.packing=true"])
    without = verdict.Certificate([TrialResult("packing", "failed", "a row sees another")])
    assert without.changes(packed, "cuda") == {"data.packing": False}
    assert certificate.changes(packed, "cpu") == {"model.attention": "eager", "data.packing": False}, "not in eager"
    offloaded = load_config(TINY, ["memory.offload=checkpoints"])
    assert verdict.Certificate([TrialResult("offload", "failed", "")]).changes(offloaded, "cuda") == {
        "memory.offload": "none"
    }
    assert certificate.kernels_off == {"lora"}
    assert verdict.Certificate([TrialResult("model", "failed", "its losses differ")]).kernels_off == set(trials.FUSED)


def planned_without(config: Config, gpu: str = "cpu") -> tuple[str, ...]:
    """The kernels that a plan of `config` leaves out."""
    return planning.planner_for(config, gpu, follow=verdict.follow).device.kernels_off


@pytest.mark.slow
def test_a_plan_follows_the_certificate_that_stands_as_the_run_does(quick, monkeypatch) -> None:
    results = [TrialResult("mlp", "failed", "one element differs"), *RESULTS[::2]]
    monkeypatch.setattr(making, "make", lambda *given, **named: results)
    traced: list[tuple[str, ...]] = []

    def trace_step(setting: Any, *models: Any) -> Any:
        traced.append(setting.device.kernels_off)
        return traced_step.trace_step(setting, *models)

    monkeypatch.setattr(planning, "trace_step", trace_step)
    job = quick(*JOB, "memory.check=refuse")
    assert planned_without(job) == ()
    finetune.train(job)
    assert set(traced) == {("mlp",)}, "the plan is made after the trials"
    for alike in (
        "training.max_steps=9", "training.micro_batch=2", "memory.checkpointing=all", "optimizer.kind=adamw_8bit",
    ):  # fmt: skip
        assert planned_without(quick(*JOB, alike)) == ("mlp",)
    for other in ("adapter.rank=2", "kernels.certificate=off"):
        assert planned_without(quick(*JOB, other)) == ()
    assert planned_without(job, "RTX 4090") == ()
    finetune.plan(job)
    finetune.fit(job)
    assert set(traced) == {("mlp",)}


@pytest.mark.slow
def test_a_run_whose_attention_failed_goes_on_and_so_does_one_in_which_it_fails_later(quick, monkeypatch) -> None:
    failed = [TrialResult("attention_implementation", "failed", "it differs")]
    for steps, results in enumerate((failed, [], failed), start=1):
        monkeypatch.setattr(verdict, "obtain", lambda *args, results=results: verdict.Certificate(results))
        run = finetune.train(quick("kernels.certificate=on", f"training.max_steps={steps}")).run
        assert run.config().model.attention == "auto"
        assert run.steps_done == steps


@pytest.mark.slow
def test_the_small_model_has_a_layer_of_each_kind_and_a_forecast() -> None:
    config = tiny_models.config(adapter__targets=["q_proj", r"model\.layers\.(2|5)\.mlp\.up_proj"])
    job = small_model.TriedJob(config, tiny_models.architecture("windows"), "sdpa", torch.device("cpu"), 2, 24)
    short, architecture = job.shortened
    assert sorted(architecture.layer_types) == ["full_attention", "sliding_attention"]
    assert short.adapter.rank == config.adapter.rank
    assert trials.forecast_of_small_model(job, tiny_models.card()).phases["backward"]["allocated_bytes"] > 0


def test_where_triton_does_not_run_the_trials_do_without_as_the_run_does(monkeypatch) -> None:
    without: list[bool] = []
    monkeypatch.setattr(libraries, "triton_obstacle", lambda: "no C compiler")
    monkeypatch.setattr(libraries, "without_triton", lambda: without.append(True))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(devices, "cap", lambda limit, device: None)
    job = small_model.TriedJob(load_config(TINY, []), None, "sdpa", torch.device("cuda"), 2, 13)
    child._bound_memory(job, {"segments"})
    assert without == [True]
    assert not job.has_triton


@pytest.mark.parametrize("fails", ["sdpa", "eager"])
def test_attention_is_not_refuted_by_the_memory_of_the_eager_computation(fails, monkeypatch) -> None:
    def results(job: Any, model: str, inputs: Any) -> dict[str, torch.Tensor]:
        if model == fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"output": torch.ones(1)}

    monkeypatch.setattr(small_model.TriedJob, "model", lambda job, attention="": attention or job.attention)
    monkeypatch.setattr(small_model.TriedJob, "results", results)
    job = child._job(requested())
    outcome = contextlib.nullcontext() if fails == "eager" else pytest.raises(torch.OutOfMemoryError)
    with outcome:
        assert trials._attention_implementation(job, ()) == {}


@pytest.mark.slow
def test_trials_run_in_a_process_of_their_own(monkeypatch) -> None:
    monkeypatch.setattr(making, "start", making.Child)
    monkeypatch.setattr(making, "missing", lambda request, kept: ["optimizer"])
    monkeypatch.setitem(trials.TRIALS, "optimizer", SimpleNamespace(tries="an optimizer", limit_seconds=300.0))
    began: list[str] = []
    assert making.make(requested(), began.append) == [TrialResult("optimizer", "held")]
    assert began == ["an optimizer"]


@pytest.mark.slow
def test_doctor_tries_a_device_writes_a_page_and_shows_what_stands(call, tmp_path, monkeypatch, shallow_base) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{name: {shallow_base}}}\ndata: {{train: rows.jsonl, max_length: 24}}\nkernels: {{fused: auto}}\n"
    )
    assert "none for this device" in machine._certificate("cpu").what
    code, out, err = call("doctor", job, "--certify", "--json")
    assert code == 0, err
    record = json.loads(out)
    assert record == json.loads((tmp_path / "certificate.json").read_text())
    assert [one["trial"] for one in record["results"]] == [name for name in trials.TRIALS if name in KEPT]
    page = (tmp_path / "certificate.html").read_text()
    assert "kernel `mlp`" in page
    assert str(tmp_path) not in page
    standing = machine._certificate("cpu")
    assert "1 kind of job" in standing.what
    monkeypatch.setattr(ops, "gated", wrong_element(ops.gated, None))
    monkeypatch.setitem(ops.ON_CPU, "finetune::gated", wrong_element(ops.ON_CPU["finetune::gated"], None))
    call("doctor", job, "--certify")
    assert machine._certificate("cpu").status == "warning"
