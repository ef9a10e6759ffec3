"""Asynchronous checkpoints: the training state is written while training continues."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import MachineError
from finetune.runtime import ranks
from finetune.runtime.memory_monitor import Peak
from finetune.runtime.out_of_memory import while_writing
from finetune.runtime.randomness import RandomState
from finetune.storage import checkpoint
from finetune.storage.checkpoint import Contents
from finetune.storage.rundir import RunDirectory
from finetune.training.progress import Progress
from finetune.training.state import snapshot
from finetune.training.step import Step


@dataclass
class Checkpoints:
    """Saves the training state while training continues: one checkpoint at a time is written in a thread.

    `keep` is the number of intact checkpoints to keep; `verified` are known to be intact. `provenance` is
    written into each manifest. `saved` is called in the training thread with each that is complete, at the next `wait`;
    `check_base_files` before each is begun, and an error that it raises ends the run with the one before.
    """

    step: Step
    schedule: Any
    run: RunDirectory
    keep: int
    provenance: dict[str, Any]
    verified: set[Path]
    saved: Callable[[Path], None]
    check_base_files: Callable[[], None]
    _writing: tuple[threading.Thread, Future[Path]] | None = field(default=None, init=False)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises MachineError or NumbersError if writing failed."""
        if self._writing:
            thread, written = self._writing
            thread.join()
            self._writing = None
            self.saved(written.result())

    def save(self, progress: Progress) -> None:
        """Copy the state to host memory; it is written, verified and published while training continues.

        Raises as `wait` and `check_base_files`.
        """
        self.wait()
        self.check_base_files()
        started = time.perf_counter()
        first = "save" not in self.step.monitor.peaks
        with self.step.monitor.counting_tensors() if first else contextlib.nullcontext():
            self.step.monitor.enter("save")
            try:
                random_states = ranks.gathered(RandomState().as_json())
                with while_writing(self.run.checkpoint(progress.step)):
                    contents = (
                        snapshot(self.step, self.schedule, progress, self.provenance, random_states)
                        if ranks.is_main() or self.step.engine.holds_parts
                        else None
                    )
            finally:
                peak = self.step.monitor.leave()
        self.step.monitor.take("save")
        if contents and ranks.is_main():
            # A daemon thread, so that a second Ctrl-C ends the process at once; an unfinished save does no harm.
            written: Future[Path] = Future()
            arguments = written, contents, progress.best_step, time.perf_counter() - started, peak
            thread = threading.Thread(target=self._write, args=arguments, name="save", daemon=True)
            self._writing = thread, written
            thread.start()

    def _write(
        self, written: Future[Path], contents: Contents, best_step: int | None, held_seconds: float, peak: Peak
    ) -> None:
        started = time.perf_counter()
        try:
            with while_writing(self.run.checkpoint(contents.step)):
                path = checkpoint.write(self.run, contents)
            self.verified.add(path)
            seconds = held_seconds + time.perf_counter() - started
            self.run.event(
                "saved", step=contents.step, seconds=round(seconds, 3), held_seconds=round(held_seconds, 3), memory=peak
            )
            checkpoint.prune(self.run, self.keep, best_step, self.verified)
            written.set_result(path)
        except OSError as error:
            written.set_exception(MachineError(f"checkpoints in {self.run.checkpoints}: {error}"))
        except BaseException as error:
            written.set_exception(error)

    def holds(self, progress: Progress) -> bool:
        """Whether this step is saved."""
        return self.run.checkpoint(progress.step) in self.run.complete_checkpoints()
