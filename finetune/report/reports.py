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
"""What `write` calls; `extras/pages/__init__.py` adds report.html."""

RENEWALS: list[Callable[[RunDirectory], Renewal]] = []
"""Made for a run by `Terminal.opened`, asked to renew after each step by `Terminal.stepped`; `extras/pages/renewal.py`
renews report.html every two minutes."""


def write(run: RunDirectory, *, end: bool = False) -> None:
    """Write the reports of a run; `end` is that of its training. Raises ArtifactError for damaged files."""
    for writer in WRITERS:
        writer(run, end=end)


tables.complete(__name__)
