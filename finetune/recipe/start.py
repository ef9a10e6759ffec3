"""One start of a run: its signals, its ranks, and the lock on the run directory."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from finetune.config import Config
from finetune.errors import FinetuneError, Terminated
from finetune.forecast.devices import cap
from finetune.model.base import blaming_base
from finetune.recipe import failures
from finetune.report.terminal import Terminal
from finetune.resolve import Job, resolve
from finetune.runtime import libraries, ranks
from finetune.runtime.device import this_device
from finetune.runtime.memory_monitor import Monitor, meter_for
from finetune.runtime.signals import Signals
from finetune.storage.rundir import RunDirectory
from finetune.training.checks import check_shares
from finetune.training.tracking import Trackers


class DeferredLock(contextlib.ExitStack):
    """Keeps other processes out of a run directory once it is taken, and records a signal that ends the run."""

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


@dataclass(frozen=True)
class Session:
    """One start of a run, on one of its ranks; `fresh` if an earlier run in its directory is moved aside."""

    run: RunDirectory
    device: torch.device
    signals: Signals
    lock: DeferredLock
    terminal: Terminal
    fresh: bool

    @property
    def earlier(self) -> RunDirectory | None:
        """The run, if it may have had an earlier start."""
        return None if self.fresh else self.run

    @property
    def resumes(self) -> bool:
        """Whether an earlier start has saved a step."""
        return bool(self.run.saved_steps) and not self.fresh


@contextlib.contextmanager
def started(asked: Config, terminal: Terminal, *, fresh: bool) -> Iterator[tuple[Session, Job]]:
    """In the block, signals are handled, ranks are connected, and failures of the disk and the base are explained.

    The job is resolved as far as its base decides. The session's lock is taken later: by `inputs.gather` for a run
    that exists, else by `opening.open_run`. On exit it is released, and the terminal's live line ends.
    """
    with ranks.refusing():
        job = resolve(asked, until="base", say=terminal.resolved)
        check_shares(job.config.training, job.config.distributed)
    run = RunDirectory(asked.output.dir or "runs/unnamed")
    with terminal, Signals(terminal.stopping) as signals:
        with ranks.refusing():
            device = this_device()
        with (
            ranks.together(device),
            DeferredLock(run) as lock,
            failures.disk_errors(run),
            blaming_base(job.config.model),
        ):
            yield Session(run, device, signals, lock, terminal, fresh), job


@contextlib.contextmanager
def computing(job: Job, own: RunDirectory, session: Session) -> Iterator[tuple[Monitor, Trackers]]:
    """In the block, memory and metrics are recorded in the rank's `own` directory, GPU memory is capped, out of memory
    is reported with what to do, and arithmetic is deterministic if the config asks for it.
    """
    config, device = job.config, session.device
    monitor = Monitor(meter_for(device.type))
    trackers = Trackers(config.tracking, own, config.model_dump(mode="json"), session.terminal.note)
    exactly = config.training.deterministic and device.type == "cuda"
    with trackers:
        cap(config.memory.limit, device)
        with (
            failures.out_of_memory(job, own, monitor, device),
            libraries.deterministic() if exactly else contextlib.nullcontext(),
        ):
            yield monitor, trackers
