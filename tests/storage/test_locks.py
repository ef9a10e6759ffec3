"""Locks: which file is opened, which holder is reported, and how long a process waits."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from messages import refusal

from finetune.errors import InUseError
from finetune.storage import locks

HOLD = """
import fcntl, os, sys
opened = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(opened, fcntl.LOCK_EX)
os.write(opened, str(os.getpid()).encode())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that holds a.lock until its input ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_waiting_for_a_lock_names_its_holder(
    held: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "_SAID_SECONDS", 0)
    threading.Timer(1, held.kill).start()
    with locks.locked(tmp_path / "a.lock", "the cache", "or wait", wait=True):
        pass
    assert f"the cache is in use by process {held.pid}: waiting" in capsys.readouterr().err


def test_a_lock_is_not_waited_for_without_end(
    held: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_MOST_SECONDS", 0)
    with refusal(InUseError, held.pid):
        locks.locked(tmp_path / "a.lock", "the cache", "or wait", wait=True).__enter__()


def test_the_lock_of_a_stopped_process_is_not_waited_for(held: subprocess.Popen[str], tmp_path: Path) -> None:
    held.send_signal(signal.SIGSTOP)
    while locks._is_stopped(held.pid) is False:
        time.sleep(0.01)
    with refusal(InUseError, "stopped:", held.pid):
        locks.locked(tmp_path / "a.lock", "the cache", "or wait", wait=True).__enter__()


@pytest.mark.parametrize("content", ["a stranger", ""])
def test_a_number_that_another_machine_may_have_written_names_no_process(
    content: str, held: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process with that number is stopped; another one, possibly on another host, holds the lock."""
    monkeypatch.setattr(locks, "_MOST_SECONDS", 0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        stranger.send_signal(signal.SIGSTOP)
        (tmp_path / "a.lock").write_text(str(stranger.pid) if content == "a stranger" else content)
        with refusal(InUseError, "in use by another process, perhaps on another machine: wait until"):
            locks.locked(tmp_path / "a.lock", "the cache", "or wait", wait=True).__enter__()
        stranger.kill()
