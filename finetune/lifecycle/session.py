"""One start of a run: its signals, its ranks, and the lock on the run directory."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from finetune.config import Config, ModelSection
from finetune.errors import FinetuneError, Terminated
from finetune.forecast.devices import cap
from finetune.lifecycle import failures
from finetune.measure.monitor import Monitor
from finetune.report.terminal import Terminal
from finetune.runtime import libraries, ranks
from finetune.runtime.device import this_device
from finetune.runtime.signals import Signals
from finetune.storage.rundir import RunDirectory


class Lock(contextlib.ExitStack):
    """Keeps other processes out of a run directory, and records a signal that ends the run."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__()
        self._run, self._taken = run, False

    def take(self) -> None:
        """Lock the directory until the end of the block, if not done yet. Raises MachineError if it is in use."""
        if not self._taken:
            self.enter_context(self._run.locked())
            self.push(self._record_signal)
            self._taken = True

    def release(self) -> None:
        """Release the directory so that it can be moved."""
        self.close()
        self._taken = False

    def _record_signal(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (Terminated, KeyboardInterrupt)):
            name = "interrupted" if isinstance(error, KeyboardInterrupt) else "terminated"
            self._run.event(name, step=max(self._run.saved_steps, default=0))


@contextlib.contextmanager
def releasing() -> Iterator[None]:
    """As a decorator, clear the local variables from an error's traceback, since a notebook keeps its last error and
    with it the model. Errors that are not the user's keep theirs, for a debugger.
    """
    try:
        yield
    except (FinetuneError, Terminated, KeyboardInterrupt) as error:
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        raise


@contextlib.contextmanager
def opened(model: ModelSection, run: RunDirectory, terminal: Terminal) -> Iterator[tuple[torch.device, Signals, Lock]]:
    """In the block, signals are handled, ranks are connected, and failures of the disk and the base are explained.

    On exit, the terminal's live line ends and the lock is released.
    """
    with terminal, Signals(terminal.stopping) as signals:
        with ranks.refusing():
            device = this_device()
        with ranks.together(device), Lock(run) as lock, failures.disk_errors(run), failures.blaming_base(model):
            yield device, signals, lock


@contextlib.contextmanager
def computing(config: Config, run: RunDirectory, monitor: Monitor, device: torch.device) -> Iterator[None]:
    """In the block, GPU memory is capped, out of memory is reported with what to do, and arithmetic is deterministic if
    the config asks for it.
    """
    cap(config.memory.limit, device)
    exactly = config.training.deterministic and device.type == "cuda"
    with (
        failures.out_of_memory(config, run, monitor, device),
        libraries.deterministic() if exactly else contextlib.nullcontext(),
    ):
        yield
