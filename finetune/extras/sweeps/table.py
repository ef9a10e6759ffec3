"""What a sweep found: its settings by loss, what was stopped and why, and the winner, if one can be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SettingState = Literal["finished", "stopped", "waiting", "diverged", "failed"]


@dataclass(frozen=True)
class SettingResult:
    """A setting over its seeds.

    `loss`: nats per trained token of the evaluation rows, after `share` of the run, in which all of its `runs` were
    compared last; None if not compared yet. `difference`: that from the best setting after the same share, with its
    95% confidence interval paired by rows and seeds; None of the best itself, and in the table of a sweep that has
    not ended. `why`: of one that was stopped, diverged or failed. `seconds`: of training, over all starts. `compared`:
    the `loss` of a `run` after each `share` of it in which it was compared, None if not finite.
    """

    setting: str
    values: dict[str, Any]
    runs: list[str]
    state: SettingState
    share: float
    loss: float | None
    difference: dict[str, float | None] | None
    why: str
    seconds: float
    compared: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SweepTable:
    """The settings of a sweep, the best first. `winner` is a setting that no other can be mistaken for on these rows
    and seeds; without one, `undecided` says why.
    """

    folder: Path
    settings: Sequence[SettingResult]
    rows: int
    winner: str | None
    undecided: str

    @property
    def note(self) -> str:
        """What the intervals leave out, if there are any."""
        has_interval = any(each.difference and each.difference["low"] is not None for each in self.settings)
        if has_interval and len(self.settings[0].runs) == 1:
            return "one seed was trained, so what another seed would change is not in the intervals"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """The table as JSON values."""
        settings = [asdict(each) for each in self.settings]
        return {**asdict(self), "folder": str(self.folder), "settings": settings, "note": self.note}
