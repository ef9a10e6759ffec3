"""Which signals end a run."""

import contextlib
import signal
from typing import Any

import pytest

from finetune.errors import Terminated
from finetune.runtime.signals import Signals


@pytest.mark.parametrize(("handler", "name"), [(lambda *_: None, "SIGHUP"), (signal.SIG_IGN, None)])
def test_a_closed_terminal_ends_a_run_as_sigterm_does_but_under_nohup(handler: Any, name: str | None) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with Signals() as signals, signals.waiting():
            signal.raise_signal(signal.SIGHUP)
            assert signals.name == name
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_is_answered_at_once_and_the_second_ends_with_what_was_saved() -> None:
    answers: list[str] = []
    with Signals(lambda: answers.append("stopping")) as signals, signals.waiting():
        signal.raise_signal(signal.SIGINT)
        assert answers == ["stopping"]
        with pytest.raises(KeyboardInterrupt, match=r"untouched\. Run the same command again to resume"):
            signal.raise_signal(signal.SIGINT)
    assert answers == ["stopping"]
    with pytest.raises(KeyboardInterrupt, match=r"step 41 is saved in runs/x\. Run the same command again to resume"):
        signals.raise_if_received("step 41 is saved in runs/x")


@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_ends_the_block_even_if_a_library_replaces_its_error(
    number: signal.Signals, end: type[BaseException]
) -> None:
    """As safetensors does: "could not determine the shape of object type"."""

    def read() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        raise ValueError("could not determine the shape")

    with pytest.raises(end, match="what was saved before is untouched"), Signals():
        read()
    with pytest.raises(ValueError, match="shape"), Signals() as signals, signals.waiting():
        read()  # a signal that waits for the end of the step does not hide an error of the step
