"""The reports of a run, which extras add: written at its end, and renewed while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from finetune import tables
from finetune.storage.rundir import RunDirectory


class Writer(Protocol):
    """Writes a report of the run as currently on disk; at the run's `end` with its pictures."""

    def __call__(self, run: RunDirectory, *, end: bool) -> object: ...


class Renewal(Protocol):
    """Renews a report while the run goes on."""

    def renew(self) -> None:
        """Start a renewal if one is due and none is under way."""

    def stop(self) -> None:
        """End a running renewal, whose older report must not replace the last one."""


WRITERS: list[Writer] = []
RENEWALS: list[Callable[[RunDirectory], Renewal]] = []


def write(run: RunDirectory, *, end: bool = False) -> None:
    """Write the reports of a run; `end` is that of its training. Raises ArtifactError for damaged files."""
    for writer in WRITERS:
        writer(run, end=end)


tables.complete(__name__)
