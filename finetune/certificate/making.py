"""Runs the trials of a job in child processes, another one after each that crashes or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from finetune.certificate.small_model import is_shared
from finetune.certificate.trials import TRIALS, missing
from finetune.storage.records import TrialResult

# The limit on all trials together: a run does not wait longer for its certificate. With `complete`, each trial has only
# its own limit.
_LIMIT_SECONDS = 60.0
_START_SECONDS = 60.0  # of a child until its first trial: it imports the libraries
# Not passed on: the child is no rank, contacts no service and needs no secrets.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SECRET = re.compile(
    r"(^|_)(TOKENS?|(API)?KEYS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?|PROXY)(_|$)|^(AWS|AZURE|GOOGLE|WANDB)_",
    re.IGNORECASE,
)
_CHILD = """
import json, sys
from finetune.runtime import libraries
with libraries.importing():
    from finetune.certificate import child
child.main(int(sys.argv[1]), json.load(sys.stdin))
"""
# The kernel's out-of-memory killer, and a batch system that ends a job.
_SIGNALS_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


def make(
    request: dict[str, Any], began: Callable[[str], None], kept: Sequence[TrialResult] = (), *, complete: bool = False
) -> list[TrialResult]:  # fmt: skip
    """The results of all trials of `request`, those that are `kept` first; calls `began` with what is tried next.

    A trial that ends its process or takes too long has failed. With `complete`, there is no limit on all together.
    """
    waiting = missing(request, kept)
    limit_seconds = sum(TRIALS[name].limit_seconds + _START_SECONDS for name in waiting) if complete else _LIMIT_SECONDS
    until = time.monotonic() + limit_seconds
    results = list(kept)
    while waiting:
        off = [result.trial for result in results if result.is_off]
        try:
            child = start({**request, "parent": os.getpid(), "trials": waiting, "off": off})
        except OSError as error:
            why = f"no process could be started for it: {error.strerror}"
            return results + [TrialResult(name, "failed", why, transient=True) for name in waiting]
        attempt = _Attempt()
        try:
            attempt.follow(child, until, began)
            why = f"its process ended ({_ending(child)})"
            transient = not attempt.trying or child.returncode in _SIGNALS_FROM_OUTSIDE
        except TimeoutError:
            why = f"it was not done after {attempt.limit_seconds:.0f} s"
            transient = not attempt.trying or time.monotonic() >= until or _is_busy(request)
            if time.monotonic() >= until:
                why = f"there was no time for it within the {limit_seconds:.0f} s of all trials"
        finally:
            child.kill()
            child.wait()
            child.results.close()
            child.printed.close()
        results += attempt.results
        waiting = waiting[len(attempt.results) :]
        if time.monotonic() >= until or attempt.is_empty:
            lost, waiting = waiting, []
        else:
            lost = [name for name in waiting if name == attempt.trying]
            waiting = [name for name in waiting if name != attempt.trying]
        results += [TrialResult(name, "failed", why, transient=transient) for name in lost]
    return results


@dataclass
class _Attempt:
    """What one child process did: the results of its trials so far, and the trial that it is `trying`, if any."""

    results: list[TrialResult] = field(default_factory=list)
    trying: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether the child ended before it began any trial."""
        return not self.results and not self.trying

    @property
    def limit_seconds(self) -> float:
        """Seconds until the next line of the child is due."""
        return TRIALS[self.trying].limit_seconds if self.trying else _START_SECONDS

    def follow(self, child: Any, until: float, began: Callable[[str], None]) -> None:
        """Read what `child` writes until it ends. Raises TimeoutError for a line that is not there in time."""
        for line in _lines(child, lambda: min(until, time.monotonic() + self.limit_seconds)):
            if "began" in line:
                self.trying = line["began"]
                began(TRIALS[self.trying].tries)
            else:
                self.results.append(TrialResult(**line))
                self.trying = ""


class Child(subprocess.Popen):
    """A process that runs trials; `results` is where it writes, `printed` what it says."""

    def __init__(self, request: dict[str, Any]) -> None:
        read, write = os.pipe()
        self.results, self.printed = open(read, "rb", buffering=0), tempfile.TemporaryFile()  # noqa: SIM115
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in _RANK_VARIABLES and not _SECRET.search(name)
        }
        # This process's modules, and none of the current directory (-P).
        environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with tempfile.TemporaryFile() as asked:  # a pipe would wait for a child that does not read it
                asked.write(json.dumps(request).encode())
                asked.seek(0)
                super().__init__(
                    [sys.executable, "-P", "-c", _CHILD, str(write)], stdin=asked,
                    stdout=self.printed, stderr=self.printed, pass_fds=[write], start_new_session=True,
                    env=environment,
                )  # fmt: skip
        except OSError:
            self.results.close()
            self.printed.close()
            raise
        finally:
            os.close(write)

    def kill(self) -> None:
        """Kill the child, and what it has started, such as a compiler that does not end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


start: Callable[[dict[str, Any]], Any] = Child
"""Starts a process for a request; it has `results`, `printed`, `kill`, `wait` and `returncode`."""


def _is_busy(request: dict[str, Any]) -> bool:
    """Whether other processes take the processor or the GPU, so that a trial may take longer than it does alone."""
    with contextlib.suppress(OSError):  # the system does not tell its load
        if os.getloadavg()[0] > (os.cpu_count() or 1):
            return True
    return is_shared(request["free_bytes"], request["total_bytes"])


def _lines(child: Any, until: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """The lines that `child` writes until it ends. Raises TimeoutError for one that does not come by `until()`."""
    received, deadline = b"", until()
    with selectors.DefaultSelector() as selector:
        selector.register(child.results, selectors.EVENT_READ)
        while True:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise TimeoutError
            part = child.results.read(2**16)
            if not part:
                return
            *lines, received = (received + part).split(b"\n")
            for line in lines:
                yield json.loads(line)
            deadline = until() if lines else deadline


def _ending(child: Any) -> str:
    """The exit status of a child process, in words, and the last line it printed."""
    code = child.wait()
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}{_last_line(child.printed)}"


def _last_line(printed: IO[bytes]) -> str:
    printed.seek(0)
    lines = printed.read()[-2000:].decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f": {last.strip()[:160]}" if last else ""
