"""Shows a forecast: on a terminal or in a log, and in a notebook.

The first line is the result, followed by its parts. Parts that are zero are omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from finetune.config import Config
from finetune.forecast.job_forecast import KV_CACHE, WORDS, Forecast
from finetune.forecast.levers import Lever
from finetune.forecast.plan import Fitted, Limits
from finetune.report import curves, printing, words
from finetune.report.view import PageView, View
from finetune.report.visible import LINES
from finetune.runtime.memory_monitor import Peak
from finetune.storage.files import write_bytes
from finetune.storage.records import LARGE_DIFFERENCE, Difference

if TYPE_CHECKING:  # imports what builds a model, which the report of a run does not need
    from finetune.forecast.answer_memory import Serving
    from finetune.forecast.plan import Plan

LARGE = f"* more than {LARGE_DIFFERENCE:.0%} from what was measured"

Levers = Sequence[tuple[Lever, Forecast]]
"""Changes of the config, each with the forecast of the job once it is made."""


@dataclass(frozen=True, repr=False)
class PlanView(PageView):
    """A job's forecast and, if it does not fit, the forecast with each lever."""

    plan: Plan

    template = "forecast.html.j2"

    @property
    def config(self) -> Config:
        """The job, with a value for each setting that was `auto` and could be fitted."""
        return self.plan.config

    @property
    def forecast(self) -> Forecast:
        """The forecast of the job."""
        return self.plan.forecast

    @property
    def levers(self) -> Levers:
        """The changes that reduce memory, each with its forecast; empty for a job that fits."""
        return self.plan.levers

    @property
    def fitted(self) -> Fitted | None:
        """The values chosen for `auto` settings; None where none were, or nothing fits."""
        return self.plan.fitted

    def title(self) -> str:
        return f"Plan of {self.plan.config.model.name}"

    def as_dict(self) -> dict[str, Any]:
        return self.plan.as_dict()

    def draw(self, path: str | PathLike[str]) -> None:
        """Write a plot of memory over the step as a PNG. Raises MachineError if it cannot be written."""
        from finetune.report import plots  # imports matplotlib, which text output does not need

        write_bytes(Path(path), plots.forecast(self.forecast))

    def show(self, console: Console) -> None:
        """Print what was chosen for `auto`, whether the job fits, what uses the memory, other costs, and the levers."""
        if why := self.plan.why_quantized:
            printing.say(console, f"quantization.kind: {self.plan.config.quantization.kind} ({why})", keep=LINES)
        if why := self.plan.why_precision:
            printing.say(console, f"training.precision: {self.plan.config.training.precision} ({why})", keep=LINES)
        if said := self.plan.evidence:
            printing.say(console, said, keep=LINES)
        if self.plan.fitted:
            ChosenView(self.plan.fitted).show(console)
        show(self.forecast, console)
        if images := words.images(self.plan.images):
            printing.facts(console, images)
        if self.plan.levers:
            title, table = _levers_table(self.plan.levers)
            printing.say(console, title, style="bold")
            printing.table(console, *table, texts=("fits", "cost"))

    def values(self) -> dict[str, Any]:
        forecast = self.forecast
        title, levers = _levers_table(self.plan.levers)
        return {
            "verdict": words.verdict(forecast),
            "facts": [*_settings(forecast).items(), *_costs(forecast).items(), *words.images(self.plan.images).items()],
            "categories": _bars(forecast),
            "phases": _phases_table(forecast),
            "levers_title": title if self.plan.levers else "",
            "levers": levers,
        }

    def charts(self) -> list[dict[str, Any]]:
        return curves.of_step(self.forecast)

    def picture(self) -> bytes:
        """Memory over the step as a PNG, if a step was traced."""
        if not self.forecast.curve:
            return b""
        from finetune.report import plots  # imports matplotlib, which text output does not need

        return plots.forecast(self.forecast)

    def __repr__(self) -> str:
        return f"<plan: {words.verdict(self.forecast)}>"


@dataclass(frozen=True)
class ServingView(View):
    """A forecast of inference: whether it fits, what uses the memory, and the size of each KV cache."""

    forecast: Serving

    def as_dict(self) -> dict[str, Any]:
        return self.forecast.as_dict()

    def show(self, console: Console) -> None:
        forecast = self.forecast
        printing.say(console, words.verdict(forecast), style="bold green" if forecast.fits else "bold red")
        on_host = f", {words.size(forecast.host_bytes)} of it in host memory" if forecast.host_bytes else ""
        sizes = ", ".join(f"{kind} {words.size(size_bytes)}" for kind, size_bytes in forecast.caches.items())
        prompts = f"{words.count(forecast.rows)} prompt{'s' * (forecast.rows > 1)} at a time"
        printing.facts(
            console,
            {
                "answers": f"{prompts}, up to {words.count(forecast.context)} tokens each, the prompt's included",
                "KV cache": f"{forecast.cache}: {words.size(forecast.cache_bytes)}{on_host}",
                "KV caches": sizes,
                "attention": forecast.attention,
            },
        )
        _parts(forecast, console)


@dataclass(frozen=True)
class ChosenView(View):
    """The values chosen for `auto` settings, each with its reason."""

    fitted: Fitted

    def as_dict(self) -> dict[str, Any]:
        """The reasons by config key."""
        return dict(self.fitted.reasons)

    def show(self, console: Console) -> None:
        for key, reason in self.fitted.reasons.items():
            printing.say(console, f"{key}: {self.fitted.text(key)} ({reason})", keep=LINES)


@dataclass(frozen=True)
class FittedView(View):
    """A fitted job, its speed-up, and the limits of its device."""

    fitted: Fitted
    limits: Limits
    config_file: Path

    def as_dict(self) -> dict[str, Any]:
        """The chosen values, the limits, and the file, as JSON values."""
        return {**self.fitted.as_dict(), "limits": self.limits.as_dict(), "config": str(self.config_file)}

    def show(self, console: Console) -> None:
        fitted, limits = self.fitted, self.limits
        show(fitted.forecast, console)
        printing.say(console)
        ChosenView(fitted).show(console)
        printing.say(
            console,
            f"predicted {fitted.speed_up:.2f} times as fast as the best setting that checkpoints every layer; "
            f"{fitted.tried} settings were forecast",
        )
        printing.say(console)
        printing.say(console, "limits with every layer checkpointed, each by itself")
        printing.facts(
            console,
            {
                "longest rows": f"{words.count(limits.length)} tokens, one row at a time",
                "largest micro-batch": f"{words.count(limits.micro_batch)} rows",
                "highest rank": words.count(limits.rank) if limits.rank else "no adapter",
                "smallest card": limits.smallest_card or "none in the table holds one row",
            },
        )
        printing.say(console)
        printing.say(console, f"wrote {self.config_file}")


def show(forecast: Forecast, console: Console) -> None:
    """Print the forecast: whether it fits, what uses the memory, and the other costs of a step."""
    printing.say(console, words.verdict(forecast), style="bold green" if forecast.fits else "bold red")
    printing.facts(console, _settings(forecast))
    _parts(forecast, console)
    if facts := _costs(forecast):
        printing.say(console)
        printing.facts(console, facts)


def _parts(forecast: Forecast | Serving, console: Console) -> None:
    """Print what uses the memory at the peak, and the memory of each phase."""
    printing.say(console)
    printing.bars(console, _bars(forecast))
    printing.say(console)
    printing.table(console, *_phases_table(forecast), texts=("",))


def compare(differences: Sequence[Difference], console: Console, note: str = "") -> None:
    """Print the forecast beside the measurement, with `note` below, and mark large differences."""
    if not differences:
        return
    printing.table(console, *compared(differences))
    if any(each.measured_bytes and each.large for each in differences):
        printing.say(console, LARGE)
    if note:
        printing.say(console, note)


def process(needed_bytes: int, peaks: dict[str, Peak]) -> str:
    """The memory of the whole process, which the table of a CPU's tensors leaves out; empty for a GPU."""
    resident = max((peak.get("resident_bytes", 0) for peak in peaks.values()), default=0)
    if not resident:
        return ""
    return (
        "tensors, in a step on the largest batch; with libraries the process was to take "
        f"{words.size(needed_bytes)} and took up to {words.size(resident)}"
    )


def compared(differences: Sequence[Difference]) -> printing.Cells:
    """The forecast beside the measurement by phase; a * marks large differences (`LARGE`)."""
    rows, several = [], len({each.measure for each in differences}) > 1
    for each in differences:
        label = f"{each.phase}, {each.measure.split('_')[0]}" if several else each.phase
        relative = f"{words.change(each.relative)} {'*' if each.large else ' '}" if each.measured_bytes else ""
        rows.append((label, words.size(each.forecast_bytes), words.size(each.measured_bytes), relative))
    return ("phase", "forecast", "measured", "difference"), rows


# -- contents ----------------------------------------------------------------------------------------------------------


def _settings(forecast: Forecast) -> dict[str, str]:
    """The settings of the forecast."""
    batch = forecast.batch
    micro_batches = forecast.tokens // batch.positions
    several = f", {words.count(micro_batches)} such micro-batches a step" if micro_batches > 1 else ""
    shown = {"batch": f"{words.batch(batch)}{several}; lengths from {batch.source}", "attention": forecast.attention}
    shown |= words.shorter(forecast)
    if forecast.ranks.sharing:
        shown["sharing"] = words.sharing(forecast.ranks.sharing)
    if forecast.device.software.expandable_segments:
        shown["allocator"] = "expandable segments"
    if forecast.experts.mixture:
        shown["experts"] = words.mixture(forecast.experts.mixture)
    shown |= words.routing(forecast)
    return shown


def _bars(forecast: Forecast | Serving) -> list[tuple[str, float, str, str]]:
    """(name, fraction of the longest bar, size, share) of the categories present at the peak, and of their sum."""
    names = {**WORDS, KV_CACHE: "KV cache"}
    sizes = {name: size_bytes for key, name in names.items() if (size_bytes := forecast.categories.get(key, 0))}
    total, longest = sum(sizes.values()), max(sizes.values(), default=1)
    bars = [
        (name, size_bytes / longest, words.size(size_bytes), words.share(size_bytes / total))
        for name, size_bytes in sizes.items()
        if not words.is_nothing(size_bytes)
    ]
    return [*bars, ("at the peak", 0, words.size(forecast.needed_bytes), words.share(1))]


def _levers_table(levers: Levers) -> tuple[str, printing.Cells]:
    """The levers, below a title that says whether one is enough."""
    enough = any(after.fits for _, after in levers)
    title = "what would make it fit" if enough else "what would make it smaller; none of these is enough"
    rows = [
        (str(lever), words.size(after.needed_bytes), "yes" if after.fits else "no", lever.cost)
        for lever, after in levers
    ]
    return title, (("change", "needs", "fits", "cost"), rows)


def _phases_table(forecast: Forecast | Serving) -> printing.Cells:
    """Memory by phase, and which phases exceed the budget: perhaps a merge, although `fits` only considers training.

    On a CPU nothing is reserved beyond the tensors, so there is only one column of sizes.
    """
    measures = ("tensors",) if forecast.device.type == "cpu" else ("allocated", "reserved")
    rows, most_before, room = list[tuple[str, ...]](), 0, forecast.device.room_bytes
    for phase, sizes in forecast.phases.items():
        allocated, reserved = sizes["allocated_bytes"], sizes["reserved_bytes"]
        # Memory reserved by an earlier phase stays reserved, and is not attributed to this one.
        is_over = allocated > room or (reserved > room and reserved > most_before)
        most_before = max(most_before, reserved)
        shown = map(words.size, (allocated, reserved)[: len(measures)])
        rows.append((phase, *shown, "over the budget" if is_over else ""))
    columns = len(measures) + (2 if any(row[-1] for row in rows) else 1)
    return ("phase", *measures, "")[:columns], [row[:columns] for row in rows]


def _costs(forecast: Forecast) -> dict[str, str]:
    """Host memory, disk and time of a step."""
    facts = {}
    # On a CPU the headline is about host memory.
    if forecast.device.type != "cpu" and not words.is_nothing(forecast.host_bytes):
        facts["host memory"] = words.size(forecast.host_bytes)
    if not words.is_nothing(forecast.disk_bytes):
        facts["disk"] = words.size(forecast.disk_bytes)
    if forecast.work.flops:
        giga, seconds = forecast.work.flops / 1e9, forecast.seconds
        facts["step"] = (
            f"{words.significant(giga, 2)} GFLOP, at least {words.significant(seconds)} s, "
            f"at most {words.count(forecast.tokens_per_second)} tokens/s"
        )
    return facts | words.scoring(forecast)
