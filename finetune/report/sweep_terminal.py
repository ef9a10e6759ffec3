"""The output of a sweep: the header once, then the progress of the run that trains, each line with its name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from finetune.config import Config
from finetune.data.prepare import Prepared
from finetune.forecast.job_forecast import Forecast
from finetune.measure.monitor import Peak
from finetune.model.structure.experts import Mixture
from finetune.report import words
from finetune.report.terminal import Terminal
from finetune.report.view import View
from finetune.storage.records import Difference
from finetune.storage.rundir import RunDirectory

_OF_THE_FIRST = ("run", "memory", "in memory")
"""Lines of the header that no other run prints: its name is before each line, and free memory differs all the time."""


class SweepTerminal(Terminal):
    """Prints the output of a sweep's runs on the console of `terminal`; one run uses it at a time (see `of`).

    The first run prints its header, the others what differs in theirs. A note is printed once, with the name of the
    first run that has it. The results of a run are in its report, and in the table of the sweep.
    """

    def __init__(self, terminal: Terminal, settings: Sequence[str], members: int, shares: Sequence[float]) -> None:
        super().__init__(console=terminal.console)
        self._settings, self._members, self._shares = settings, members, shares
        self._said: set[str] = set()
        self._name, self._share = "", 1.0
        self._is_first = True

    def began(self, notes: Mapping[str, Sequence[str]]) -> None:
        """Print how many runs there will be, and notes on their configs with the settings that each holds for."""
        settings = len(self._settings)
        seeds = f" x {words.count(self._members // settings)} seeds" if self._members > settings else ""
        shares = ", ".join(map(words.share, self._shares))
        halved = f"; of those that can be told apart, half are stopped after {shares} of a run" if shares else ""
        self._facts({"sweep": f"{words.count(settings)} settings{seeds}{halved}"})
        for note, holds_for in notes.items():
            self.once(note if len(holds_for) == settings else f"{', '.join(holds_for)}: {note}")
            self._said.add(note)  # else each run would print it again

    def of(self, name: str, share: float) -> Self:
        """This terminal, on which the run `name` trains up to `share` of its steps from now on."""
        self._name, self._share = name, share
        return self

    def once(self, text: str) -> None:
        """Print a note of the sweep, unless it was printed before."""
        if self._is_new(text):
            super()._say(text, "yellow")

    # -- what a run prints -----------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if self._is_new(text):
            super().note(text)

    def show(self, view: View) -> None:
        for line in str(view).splitlines():
            if self._is_new(line.partition(" (")[0]):  # a reason in brackets may name the free memory, which varies
                self._say(line)

    def opened(
        self, path: Path, config: Config, device: Any, data: Prepared, attention: str, forecast: Forecast | None,
        processes: int = 1, mixture: Mixture | None = None,
    ) -> None:  # fmt: skip
        super().opened(path, config, device, data, attention, forecast, processes, mixture)
        self._facts({"in memory": self._resident(forecast)})

    def started(self, first_step: int, last_step: int) -> None:
        self._is_first = False
        pause = math.ceil(self._share * last_step)
        self._say(f"trains from step {first_step} to {pause} of {last_step}")
        super().started(first_step, pause)

    def answers(self, run: RunDirectory) -> None:
        self.close()

    def compared(self, differences: Sequence[Difference], needed_bytes: int, peaks: dict[str, Peak]) -> None:
        pass

    def finished(self, run: RunDirectory) -> None:
        self.close()

    def _resident(self, forecast: Forecast | None) -> str:
        """How many runs are in memory at a time: one trains, and others wait for their next round."""
        one = "the base and one run at a time"
        if not (forecast and self._shares):
            return one
        run_bytes = sum(forecast.categories.get(part, 0) for part in ("adapter", "optimizer_states"))
        fit = 1 + max(0, forecast.budget_bytes - forecast.needed_bytes) // max(1, run_bytes)
        runs = f"{words.count(min(self._members, fit))} of {words.count(self._members)} runs"
        return one if fit == 1 else f"the base and up to {runs} at a time"

    def _is_new(self, text: str) -> bool:
        is_new = text not in self._said
        self._said.add(text)
        return is_new

    def _say(self, text: str = "", style: str = "") -> None:
        super()._say(f"{self._name}: {text}" if self._name else text, style)

    def _facts(self, facts: dict[str, str]) -> None:
        new = {name: fact for name, fact in facts.items() if self._is_new(f"{name}: {fact}")}
        if self._is_first and new:
            super()._facts(new)
            return
        for name, fact in new.items():
            if name not in _OF_THE_FIRST:
                self._say(f"{name}: {fact}")
