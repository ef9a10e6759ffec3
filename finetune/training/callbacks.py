"""Callbacks: a user's own code, told of each step, evaluation and checkpoint of a run."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from finetune.runtime import ranks


class Callback(Protocol):
    """What a run calls between its steps, on rank 0. Derive from it and define the methods that you need.

    An exception ends the run: the step under way is completed and saved, then `train` raises it on every rank.
    """

    def on_step(self, metrics: dict[str, Any]) -> None:
        """Called after each optimizer step with its line of metrics.jsonl.

        `step` (from 1), `loss` (nats per trained token; None if it is not finite), `learning_rate`, `grad_norm`,
        `epoch`, `tokens`, `tokens_per_second`, `padding_share` and `memory`: peak bytes by phase and measure.
        """

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        """Called after each evaluation, that of step 0 included, with its line of metrics.jsonl.

        `step`, `eval_loss` (cross-entropy in nats per trained token, whatever the objective) and `memory`.
        """

    def on_save(self, checkpoint: Path) -> None:
        """Called once a checkpoint is complete and verified. Saving overlaps the next step, so this comes after it."""


class Callbacks:
    """Calls a run's callbacks until one fails; `error` is its exception."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self.error: Exception | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    def stepped(self, line: dict[str, Any]) -> None:
        self._call("on_step", line)

    def evaluated(self, line: dict[str, Any]) -> None:
        self._call("on_evaluation", line)

    def saved(self, checkpoint: Path) -> None:
        self._call("on_save", checkpoint)

    def _call(self, method: str, subject: Any) -> None:
        if self.error is None:
            try:
                for callback in self._callbacks:
                    getattr(callback, method)(subject)
            except Exception as error:
                self.error = error

    def share(self) -> None:
        """Give every rank the exception of rank 0, whose callbacks alone are called; called by all of them."""
        of_main = ranks.gathered(self.error and _portable(self.error))[0]
        self.error = self.error or of_main

    def raise_error(self, saved: str) -> NoReturn:
        """Raise the exception of the callback that failed, with a note on what is `saved`."""
        assert self.error is not None
        self.error.add_note(f"Raised in a callback. {saved}; the same call goes on from there.")
        raise self.error


def _portable(error: Exception) -> Exception:
    """`error`, or its text where a process cannot send it to another."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 -- just made
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
