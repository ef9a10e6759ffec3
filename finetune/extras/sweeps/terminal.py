"""The output of a sweep: the header once, then the progress of the run that trains, each line with its name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from finetune.report import words
from finetune.report.terminal import Terminal
from finetune.report.view import View
from finetune.runtime.memory_monitor import Peak
from finetune.storage.records import Difference
from finetune.storage.rundir import RunDirectory


class SweepTerminal(Terminal):
    """Prints the output of a sweep's runs on the console of `terminal`; one run uses it at a time (see `of`).

    The first run prints its header. A note is printed once, with the name of the first run that has it. The results of
    a run are in its report, and in the table of the sweep.
    """

    def __init__(self, terminal: Terminal, settings: int, members: int, shares: Sequence[float]) -> None:
        super().__init__(console=terminal.console)
        self._settings, self._members, self._shares = settings, members, shares
        self._said: set[str] = set()
        self._name, self._share = "", 1.0
        self._is_first = True

    def began(self) -> None:
        """Print how many runs there will be."""
        settings = self._settings
        seeds = f" x {words.count(self._members // settings)} seeds" if self._members > settings else ""
        shares = ", ".join(map(words.share, self._shares))
        halved = f"; of those that can be told apart, half are stopped after {shares} of a run" if shares else ""
        self._facts({"sweep": f"{words.count(settings)} settings{seeds}{halved}"})

    def of(self, name: str, share: float) -> Self:
        """This terminal, on which the run `name` trains up to `share` of its steps from now on."""
        self._name, self._share = name, share
        return self

    # -- what a run prints -----------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if self._is_new(text):
            super().note(text)

    def show(self, view: View) -> None:
        for line in str(view).splitlines():
            if self._is_new(line.partition(" (")[0]):  # a reason in brackets may name the free memory, which varies
                self._say(line)

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

    def _is_new(self, text: str) -> bool:
        is_new = text not in self._said
        self._said.add(text)
        return is_new

    def _say(self, text: str = "", style: str = "") -> None:
        super()._say(f"{self._name}: {text}" if self._name else text, style)

    def _facts(self, facts: dict[str, str]) -> None:
        if self._is_first:
            super()._facts(facts)
