"""Callbacks: a user's own code, called after each step, evaluation and checkpoint of a run."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, cast

from finetune.config.field_types import nearest, shown
from finetune.errors import ConfigError
from finetune.runtime import ranks


class Callback(Protocol):
    """Called by a run between its steps, on rank 0. Derive from it and define the methods that you need.

    An exception ends the run: the step under way is completed and saved, then `train` raises it on every rank.
    """

    def on_step(self, metrics: dict[str, Any]) -> None:
        """Called after each optimizer step with its line of metrics.jsonl.

        `step` (from 1), `loss` (nats per trained token; None if it is not finite), `learning_rate`, `grad_norm`,
        `epoch`, `tokens`, `tokens_per_second`, `padding_share` and `memory`: peak bytes by phase and measure; and what
        the objective records, such as `rewards_margins`.
        """

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        """Called after each evaluation, that of step 0 included, with its line of metrics.jsonl.

        `step`, `eval_loss` (cross-entropy in nats per trained token; of pairs, the objective's own) and `memory`.
        """

    def on_save(self, checkpoint: Path) -> None:
        """Called once a checkpoint is complete and verified. Saving overlaps the next step, so this comes after it."""


METHODS = ("on_step", "on_evaluation", "on_save")

AnyCallback = Callback | Callable[[dict[str, Any]], object]
"""What `train` takes as a callback: a function is called with each line of metrics, of a step or an evaluation."""


def checked(given: Iterable[AnyCallback] | None) -> tuple[Callback, ...]:
    """The callbacks of a run; none at first if `given` is None. Raises ConfigError if one is not a callback."""
    if given is None:
        return ()
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ConfigError(f"`callbacks` must be a list of callbacks, not {shown(given)}")
    return tuple(_checked(one, f"`callbacks[{index}]`") for index, one in enumerate(given))


def _checked(given: Any, where: str) -> Callback:
    if isinstance(given, type):
        raise ConfigError(f"{where} is the class {given.__name__}; give an object of it: {given.__name__}()")
    named = [name for name in dir(given) if name.startswith("on_") and callable(getattr(given, name, None))]
    if not named and callable(given):
        _takes_one(given, where)
        return cast(Callback, SimpleNamespace(on_step=given, on_evaluation=given))
    if not set(named) & set(METHODS):
        raise ConfigError(
            f"{where} is {shown(given)}: a callback is a function of a dict of metrics, or has some of the methods "
            f"{', '.join(METHODS)}"
        )
    for name in named:
        if name not in METHODS:  # a misspelt name, or another library's callback
            raise ConfigError(f"{where}: `{name}` would never be called; {nearest(name, METHODS)}")
        _takes_one(getattr(given, name), f"{where}: `{name}`")
    return cast(Callback, given)


def _takes_one(function: Any, where: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where} is asynchronous, so that calling it would do nothing; define it with `def`")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise ConfigError(f"{where} must be a function that takes one argument") from None
    except ValueError:  # some builtins do not say what they take
        pass


class Callbacks:
    """Calls a run's callbacks until one fails; `error` is its exception.

    Each is given a copy, so that what it changes reaches neither the run nor another callback.
    """

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
                    if call := getattr(callback, method, None):
                        call(copy.deepcopy(subject))
            except Exception as error:
                self.error = error

    def share(self) -> None:
        """Give every rank the exception of rank 0, whose callbacks alone are called; called by all of them."""
        shared = self.error
        try:
            pickle.loads(pickle.dumps(shared))  # noqa: S301 -- just made
        except Exception:  # its text, where a process cannot send it to another
            shared = RuntimeError(f"{type(self.error).__name__}: {self.error}")
        [of_rank_0, *_] = ranks.gathered(shared)  # by all ranks, also by one that has an error
        self.error = self.error or of_rank_0

    def raise_error(self, saved: str) -> NoReturn:
        """Raise the exception of the callback that failed, with a note on what is `saved`."""
        assert self.error is not None
        self.error.add_note(f"Raised in a callback. {saved}; the same call goes on from there.")
        raise self.error
