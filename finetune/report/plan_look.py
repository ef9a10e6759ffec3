"""Plans a job, and shows the plan: in a notebook, as a plot, and as the message if the job does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import Config
from finetune.forecast.fit import Fitted
from finetune.forecast.levers import Lever
from finetune.forecast.planning import planner_for
from finetune.forecast.replay import Forecast
from finetune.report import forecast_view, printing, words
from finetune.storage.files import write_bytes, write_text


@dataclass(frozen=True, repr=False)
class Plan:
    """A job's forecast and, if it does not fit, the forecast with each lever."""

    config: Config
    forecast: Forecast
    levers: tuple[tuple[Lever, Forecast], ...]
    fitted: Fitted | None = None
    """What was chosen where the job says `auto`; None where nothing was, or nothing fits."""

    def as_dict(self) -> dict[str, Any]:
        """The forecast and the levers as JSON values."""
        levers = [
            {
                "changes": dict(lever.changes),
                "cost": lever.cost,
                "needed_bytes": after.needed_bytes,
                "saved_bytes": self.forecast.needed_bytes - after.needed_bytes,
                "fits": after.fits,
            }
            for lever, after in self.levers
        ]
        return {**self.forecast.as_dict(), "levers": levers}

    def draw(self, path: Path) -> None:
        """Write a plot of memory over the step as a PNG. Raises MachineError if it cannot be written."""
        from finetune.report import memory_plot  # imports matplotlib, which text output does not need

        write_bytes(path, memory_plot.forecast(self.forecast))

    def write(self, path: Path) -> None:
        """Write a self-contained HTML page. Raises MachineError if it cannot be written."""
        write_text(path, forecast_view.page(self.forecast, self.levers, f"Plan of {self.config.model.name}"))

    def __str__(self) -> str:
        return printing.text(lambda console: forecast_view.show(self.forecast, console))

    def __repr__(self) -> str:
        return f"<plan: {words.verdict(self.forecast)}>"

    def _repr_html_(self) -> str:
        return forecast_view.html(self.forecast)


def plan(config: Config, gpu: str | None = None, gpus: int = 1) -> Plan:
    """Forecast the job on `gpu`: a GPU's name, a size such as 24GiB, `auto` or `cpu`; by default this machine's device.

    With several `gpus` the forecast is that of one of them. Settings that are `auto` are fitted first. Raises a
    FinetuneError for an unknown model or GPU, or a batch that so many cannot share.
    """
    planner = planner_for(config, gpu, gpus)
    config, fitted = planner.settle()
    found = fitted.forecast if fitted else planner.forecast(config)
    return Plan(config, found, () if found.fits else tuple(planner.levers(config, found)), fitted)


def does_not_fit(found: Forecast, levers: list[tuple[Lever, Forecast]]) -> str:
    """The message for a job that does not fit: by how much, with which batch, and what would help."""
    batch = found.batch
    lines = [
        f"the job does not fit {found.device.name}: it would take {words.size(found.needed_bytes)} of "
        f"{words.size(found.budget_bytes)}, at its largest batch ({words.batch(batch)}, from "
        f"{batch.source}). What would help:"
    ]
    for lever, after in levers:
        verdict = "fits" if after.fits else "does not fit yet"
        lines.append(f"  {lever}: {words.size(after.needed_bytes)}, {verdict} ({lever.cost})")
    return "\n".join(lines)
