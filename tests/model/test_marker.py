"""What crashed a process or hung is left out by the next start; what a living process tries is not."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import TINY
from messages import refusal

from finetune.choices import load_config
from finetune.errors import MachineError, NumbersError, Terminated
from finetune.model.probes import marker
from finetune.runtime import environment
from finetune.storage import private
from finetune.training import probe_table

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return private.folder_beside("probes")


def forked(in_probe: Callable[[], None]) -> int:
    """A process in the probe of a kernel, once it does `in_probe` there; what takes longer than 0.05 s hangs."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            marker._HANG_SECONDS = 0.05
            with marker.under_way("kernels", CPU), marker.under_way("mlp", CPU):
                os.write(write, b"there")
                in_probe()
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 5)
    os.close(read)
    return pid


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("in_probe", "sent", "named"),
    [
        (crash, None, {"mlp"}),
        (os.abort, None, {"mlp"}),
        (hang, signal.SIGKILL, {"mlp"}),
        (hang, signal.SIGINT, {"mlp"}),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), None, set()),
    ],
    ids=["crash", "abort", "hang, killed", "hang, interrupted", "killed from outside"],
)
def test_what_crashes_or_hangs_is_named_and_what_was_killed_is_not(
    in_probe: Callable[[], None], sent: signal.Signals | None, named: set[str], cache: Path
) -> None:
    pid = forked(in_probe)
    if sent:
        time.sleep(0.5)
        os.kill(pid, sent)
    os.waitpid(pid, 0)
    assert marker.ended(CPU) == named
    for file in marker.left_behind(CPU):
        file.unlink()
    assert not marker.ended(CPU)
    assert not [*cache.iterdir()]


def test_what_a_live_process_tries_is_not_blamed() -> None:
    pid = forked(hang)
    time.sleep(0.5)
    with marker.under_way("norm", CPU):
        assert not marker.ended(CPU)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert marker.ended(CPU) == {"mlp"}


@pytest.mark.parametrize(
    ("error", "seconds", "named"),
    [
        (None, 0.2, set()),
        (RuntimeError(), 0.2, set()),
        (torch.OutOfMemoryError(), 0.2, set()),
        (KeyboardInterrupt(), 0, set()),
        (KeyboardInterrupt(), 0.2, {"mlp"}),
        (Terminated(""), 0.2, {"mlp"}),
    ],
)
def test_only_an_interrupted_hang_counts_of_what_ends_in_good_order(
    error: BaseException | None, seconds: float, named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marker, "_HANG_SECONDS", 0.1)
    with contextlib.suppress(BaseException), marker.under_way("kernels", CPU):
        time.sleep(0.2)
        with marker.under_way("mlp", CPU):
            time.sleep(seconds)
            if error:
                raise error
    assert marker.ended(CPU) == named


@pytest.mark.parametrize("enabled", [True, False])
def test_faulthandler_is_as_it_was_after_a_probe(enabled: bool) -> None:
    before = faulthandler.is_enabled()
    faulthandler.enable() if enabled else faulthandler.disable()
    with marker.under_way("mlp", CPU):
        assert faulthandler.is_enabled()
    assert faulthandler.is_enabled() is enabled
    faulthandler.enable() if before else faulthandler.disable()


@pytest.fixture
def left(cache: Path) -> Path:
    """The file of a process that ended while it tried a kernel."""
    os.waitpid(forked(crash), 0)
    (file,) = cache.iterdir()
    return file


def test_another_driver_or_version_tries_again(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = environment.packages()
    monkeypatch.setattr(environment, "packages", lambda: {**plain, "torch": "99"})
    marker._key.cache_clear()
    assert not marker.ended(CPU)
    monkeypatch.undo()
    marker._key.cache_clear()


@pytest.mark.parametrize("change", [lambda file: file.chmod(0o666), lambda file: file.write_text("")])
def test_a_file_that_others_could_write_or_that_is_empty_names_nothing(change: Callable, left: Path) -> None:
    change(left)
    assert not marker.ended(CPU)


def test_without_a_private_cache_probes_run(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with marker.under_way("mlp", CPU):
        assert not [*cache.iterdir()]


def test_what_a_job_does_without() -> None:
    job = load_config(TINY, ["kernels.fused=auto"])
    packed = load_config(TINY, ["data.packing=true"])
    assert probe_table.kernels_off({"mlp", "loss"}) == {"mlp", "loss"}
    assert probe_table.kernels_off({"causality"}) == {*probe_table.FUSED}
    assert probe_table.kernels_off({"packing", "sharing", "unknown"}) == set()
    line = probe_table.left_out(job, {"mlp"})
    assert line
    assert "`mlp`" in line
    assert probe_table.left_out(job, {"packing"}) is None
    assert probe_table.left_out(load_config(TINY, ["kernels.fused=off"]), {"mlp"}) is None
    with refusal(MachineError, "data.packing:"):
        probe_table.left_out(packed, {"packing"})


@pytest.mark.parametrize(("where", "files"), [("copy", 0), ("model", 1)])
def test_a_probe_on_a_copy_is_not_named_and_may_overflow(
    where: probe_table.Where, files: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def overflows(subject: probe_table.Subject) -> None:
        found.append(len([*cache.glob("*")]))
        raise NumbersError("not finite")

    causality = replace(probe_table.PROBES["causality"], run=overflows)
    monkeypatch.setattr(probe_table, "PROBES", {"causality": causality})
    subject = probe_table.Subject(load_config(TINY), torch.nn.Module(), where=where)
    subject.model.device = CPU
    with contextlib.nullcontext() if where == "copy" else pytest.raises(NumbersError):
        assert not probe_table.run("built", subject)
    assert found == [files]
