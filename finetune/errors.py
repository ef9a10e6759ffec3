"""The errors that users see, each with its exit code.

An error is one short paragraph: what is wrong, where, and what to do. The command line prints it and exits with
`exit_code`; a traceback is shown only with `--debug`. `assert` is for invariants, never for what a user did.
"""

from __future__ import annotations


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """The first line of a library's message, or `otherwise` (by default the error's type) where it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__ if otherwise is None else otherwise])[0]


class FinetuneError(Exception):
    """Base of every error that is meant for the user."""

    exit_code = 1
    shared = False
    """Whether every rank raises this error, so that only one of them prints it."""

    def share(self) -> None:
        """Mark it as one that all processes of a run raise alike."""
        self.shared = True


class ConfigError(FinetuneError):
    """The configuration is wrong: every problem found, one a line."""

    exit_code = 2


class ForecastError(ConfigError):
    """A step that fails on fake tensors and so has no forecast; `memory.check: off` trains the model anyway."""


class DataError(FinetuneError):
    """A data file or row cannot be used."""

    exit_code = 3


class MachineError(FinetuneError):
    """This machine lacks something the job needs: a device, a package, disk space, network."""

    exit_code = 4


class InUseError(MachineError):
    """Another process works in the same directory."""


class NumbersError(FinetuneError):
    """Training produced numbers that are not finite, or diverged."""

    exit_code = 5


class OutOfMemoryError(FinetuneError):
    """The job does not fit the device's memory."""

    exit_code = 6

    def __init__(self, message: str = "", *, next_start: str = "") -> None:
        super().__init__(message)
        self.next_start = next_start
        """What the same command does differently when it is given again, as a sentence; empty if nothing."""


class ArtifactError(FinetuneError):
    """A checkpoint, adapter, model or run directory is damaged, foreign or incomplete."""

    exit_code = 7


INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended."""


class Terminated(SystemExit):
    """SIGTERM ended the run, in good order. No library handles it, since it is not an Exception."""

    exit_code = 143

    def __init__(self, message: str) -> None:
        super().__init__(self.exit_code)
        self.message = message

    def __str__(self) -> str:
        return self.message
