"""What was tried when a process ended is left out by the next start, and what a process tries that is alive is not."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import TINY
from messages import refusal

from finetune.choices import load_config
from finetune.errors import MachineError, Terminated
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
    """A process in the probe of a kernel, once it does `in_probe` there."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            marker._HANG_SECONDS = 0.0
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
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(600)


@pytest.mark.parametrize(("in_probe", "sent"), [(crash, None), (hang, signal.SIGKILL), (hang, signal.SIGINT)])
def test_the_part_that_was_tried_when_a_process_ended_is_named(
    in_probe: Callable[[], None], sent: signal.Signals | None
) -> None:
    pid = forked(in_probe)
    if sent:
        os.kill(pid, sent)
    os.waitpid(pid, 0)
    assert marker.ended(CPU) == {"mlp"}
    (file,) = marker.left_behind(CPU)
    file.unlink()
    assert not marker.ended(CPU)


def test_what_a_live_process_tries_is_not_blamed() -> None:
    pid = forked(hang)
    with marker.under_way("norm", CPU):
        assert not marker.ended(CPU)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert marker.ended(CPU) == {"mlp"}


@pytest.mark.parametrize(
    ("error", "seconds", "named"),
    [
        (None, 0, set()),
        (RuntimeError(), 999, set()),
        (torch.OutOfMemoryError(), 999, set()),
        (KeyboardInterrupt(), 59, set()),
        (KeyboardInterrupt(), 61, {"mlp"}),
        (Terminated(""), 61, {"mlp"}),
    ],
)
def test_only_an_interrupted_hang_counts_of_what_ends_in_good_order(
    error: BaseException | None, seconds: float, named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(marker.time, "monotonic", lambda: now)
    with contextlib.suppress(BaseException), marker.under_way("kernels", CPU):
        now += 999
        with marker.under_way("mlp", CPU):
            now += seconds
            if error:
                raise error
    assert marker.ended(CPU) == named


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
