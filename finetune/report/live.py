"""The live view of training on a terminal: progress, loss with its trend, speed, memory beside budget and forecast."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from finetune.forecast.job_forecast import Forecast
from finetune.report import printing, words
from finetune.runtime.memory_monitor import headline

# The trend of the loss is that of its mean over these steps to its mean over as many before.
_TREND_STEPS = 10
# Smaller relative changes count as flat.
_FLAT = 0.005

STOPPING = "finishing and saving this step; press Ctrl-C again to stop without saving"


class LiveView:
    """Lines at the bottom of a terminal, drawn several times a second until `stop`."""

    def __init__(self, console: Console, first_step: int, last_step: int, forecast: Forecast | None) -> None:
        self._first_step, self._last_step, self._forecast = first_step, last_step, forecast
        self._unicode = printing.knows_unicode(console)
        self._started = time.perf_counter()
        self._line: dict[str, Any] = {}
        self._evaluated = ""
        self._peak_bytes = 0
        self._losses: deque[float] = deque(maxlen=2 * _TREND_STEPS)
        self.stopping = False
        """True once a signal is to end the run after this step; a signal handler sets it, without a lock."""
        self._live = Live(self, console=console, refresh_per_second=4)
        self._live.start()

    def stop(self) -> None:
        """Draw the lines a last time, and leave them."""
        self._live.stop()

    def stepped(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl."""
        self._line = line
        self._peak_bytes = max(self._peak_bytes, headline(line["memory"]))
        if line["loss"] is not None:
            self._losses.append(line["loss"])

    def evaluated(self, line: dict[str, Any]) -> None:
        """Show an evaluation."""
        self._evaluated = f"  eval loss {words.loss(line['eval_loss'])}"

    def __rich__(self) -> RenderableType:
        rows = Table.grid(padding=(0, 1), expand=True)
        rows.add_column(no_wrap=True)
        rows.add_column(ratio=1)
        rows.add_column(no_wrap=True)
        step, left = self._line.get("step", self._first_step), ""
        if done := step - self._first_step:
            # Between steps the clock goes on, so that the estimate shows it when a step takes long.
            seconds = (time.perf_counter() - self._started) / done * (self._last_step - step)
            left = f"{words.duration(seconds)} left"
        rows.add_row(f"step {step}/{self._last_step}", ProgressBar(self._last_step, step), left)
        if self._line and self._forecast:
            budget_bytes = self._forecast.budget_bytes
            text = f"{words.size(self._peak_bytes)} of {words.size(budget_bytes)}"
            text += f", forecast {words.size(self._forecast.needed_bytes)}"
            rows.add_row("memory", ProgressBar(budget_bytes, min(self._peak_bytes, budget_bytes)), text)
        lines: list[RenderableType] = [rows]
        if self._line:
            lines.append(Text(self._figures()))
        if self.stopping:
            lines.append(Text(STOPPING, style="yellow"))
        return Group(*lines)

    def _figures(self) -> str:
        line, trend = self._line, ""
        if len(self._losses) == 2 * _TREND_STEPS:
            losses = list(self._losses)
            before, now = statistics.fmean(losses[:_TREND_STEPS]), statistics.fmean(losses[_TREND_STEPS:])
            falls, rises, stays = "↓↑→" if self._unicode else ("falling", "rising", "flat")
            trend = f" {stays if abs(now - before) <= _FLAT * abs(before) else falls if now < before else rises}"
        norm = "nan" if line["grad_norm"] is None else f"{line['grad_norm']:.3g}"
        memory = "" if self._forecast else f"  {words.size(self._peak_bytes)}"
        return (
            f"loss {words.loss(line['loss'])}{trend}{self._evaluated}{words.preferred(line)}  grad norm {norm}  "
            f"lr {line['learning_rate']:.2e}  {words.count(line['tokens_per_second'])} tokens/s{memory}"
        )
