"""Handles SIGTERM, SIGHUP, SIGINT and SIGUSR1.

During training, SIGTERM, SIGHUP and a first SIGINT let the current step finish and save it; another SIGINT ends the run
at once. At any other time (tokenizing, loading, evaluating, merging) they end it at once, since nothing is lost.
SIGUSR1 requests a checkpoint. A SIGHUP that is ignored already (`nohup`) stays ignored.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from finetune.errors import Terminated


class Signals:
    """The signals received so far. As a context manager, installs the handlers (only in the main thread).

    `on_stop` is called by the handler of the first signal that ends the run.
    """

    def __init__(self, on_stop: Callable[[], None] = lambda: None) -> None:
        self._on_stop = on_stop
        self._stopping: signal.Signals | None = None
        self._save_asked = False
        self._waits = False
        self._raised: BaseException | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop, signal.SIGUSR1: self._save}
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                handlers[signal.SIGHUP] = self._stop
            for number, handler in handlers.items():
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and cannot be restored from here.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        # A library that calls Python, such as safetensors, may raise an error of its own in place of the handler's.
        if self._raised is not None and isinstance(error, Exception):
            raise self._raised

    @property
    def name(self) -> str | None:
        """The signal that ends the run, such as SIGTERM, if one was received."""
        return self._stopping.name if self._stopping else None

    def take_save(self) -> bool:
        """Return True if a checkpoint was requested since the last call."""
        asked, self._save_asked = self._save_asked, False
        return asked

    def take_stop(self, name: str | None) -> None:
        """Act on a signal that another rank received."""
        if name and self._stopping is None:
            self._stopping = signal.Signals[name]

    @contextlib.contextmanager
    def waiting(self, waits: bool = True) -> Iterator[None]:
        """A block in which signals only set flags; inside it, `waiting(False)` makes them act at once again."""
        before, self._waits = self._waits, waits
        try:
            yield
        finally:
            self._waits = before

    def raise_if_received(self, what: str = "nothing was lost") -> None:
        """Raise Terminated, or KeyboardInterrupt for SIGINT, if a signal was received."""
        if self._stopping is not None:
            raise self._error(what)

    def _error(self, what: str) -> BaseException:
        what += ". Run the same command again to resume"
        return KeyboardInterrupt(what) if self._stopping == signal.SIGINT else Terminated(f"terminated: {what}")

    def _stop(self, number: int, frame: Any) -> None:
        first = self._stopping is None
        again = not first and number == signal.SIGINT
        if first or again:
            self._stopping = signal.Signals(number)
        if first:
            self._on_stop()
        if again or (first and not self._waits):
            self._raised = self._error("what was saved before is untouched")
            raise self._raised

    def _save(self, number: int, frame: Any) -> None:
        self._save_asked = True
