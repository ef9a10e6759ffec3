"""Renews the report and the plot of a run while it goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from finetune.storage.rundir import RunDirectory

# Drawing takes seconds of one core.
_EVERY_SECONDS = 120

# The renewal runs outside the job: without a rank and without a GPU.
_UNSET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Renewal:
    """Runs `finetune report` every two minutes, in a process of its own.

    This keeps the plot's memory out of the run's measured peaks, and an error, such as a full disk, away from the run.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._last = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def renew(self) -> None:
        """Start a renewal if one is due and none is under way."""
        now = time.monotonic()
        if now - self._last < _EVERY_SECONDS or (self._process and self._process.poll() is None):
            return
        self._last = now
        environment = {name: value for name, value in os.environ.items() if name not in _UNSET}
        # `-m` would look for modules in the working directory first, which may be somebody else's.
        path = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with contextlib.suppress(OSError):  # no memory, or no processes left
            self._process = subprocess.Popen(
                [sys.executable, "-m", "finetune", "report", str(self._run.path)],
                env={**environment, **path, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )  # fmt: skip

    def stop(self) -> None:
        """Kill a running renewal: its older report must not replace the last one."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
