"""Shows a forecast: on a terminal or in a log, and in a notebook.

The first line is the result, followed by its parts. Parts that are zero are omitted.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from rich.console import Console

from finetune.forecast.answer_memory import KV_CACHE, Serving
from finetune.forecast.levers import Lever
from finetune.forecast.replay import WORDS, Forecast
from finetune.measure.monitor import Peak
from finetune.report import pages, printing, step_curve, words
from finetune.storage.records import LARGE_DIFFERENCE, Difference

LARGE = f"* more than {LARGE_DIFFERENCE:.0%} from what was measured"


def show(forecast: Forecast, console: Console) -> None:
    """Print the forecast: whether it fits, what uses the memory, and the other costs of a step."""
    printing.say(console, words.verdict(forecast), style="bold green" if forecast.fits else "bold red")
    printing.facts(console, _settings(forecast))
    _parts(forecast, console)
    if facts := _costs(forecast):
        printing.say(console)
        printing.facts(console, facts)


def show_serving(forecast: Serving, console: Console) -> None:
    """Print the forecast of inference: whether it fits, what uses the memory, and the size of each KV cache."""
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


def _parts(forecast: Forecast | Serving, console: Console) -> None:
    """Print what uses the memory at the peak, and the memory of each phase."""
    printing.say(console)
    printing.bars(console, _bars(forecast))
    printing.say(console)
    printing.table(console, *_phases_table(forecast), texts=("",))


def levers(found: Sequence[tuple[Lever, Forecast]], console: Console) -> None:
    """Print each lever that would reduce the job's memory, and the forecast with it."""
    if found:
        printing.say(console, _levers_title(found), style="bold")
        printing.table(console, *_levers_table(found), texts=("fits", "cost"))


def compare(differences: Sequence[Difference], console: Console, note: str = "") -> None:
    """Print the forecast beside the measurement, with `note` below, and mark large differences."""
    if not differences:
        return
    printing.table(console, *compared(differences))
    if any(found.measured_bytes and found.large for found in differences):
        printing.say(console, LARGE)
    if note:
        printing.say(console, note)


def process(needed_bytes: int, peaks: dict[str, Peak]) -> str:
    """What the table of a CPU's tensors leaves out; empty for a GPU."""
    resident = max((peak.get("resident_bytes", 0) for peak in peaks.values()), default=0)
    if not resident:
        return ""
    return (
        "tensors, in a step on the largest batch; with libraries the process was to take "
        f"{words.size(needed_bytes)} and took up to {words.size(resident)}"
    )


def compared(differences: Sequence[Difference]) -> printing.Cells:
    """The forecast beside the measurement by phase; a * marks large differences (`LARGE`)."""
    rows, several = [], len({found.measure for found in differences}) > 1
    for found in differences:
        label = f"{found.phase}, {found.measure.split('_')[0]}" if several else found.phase
        relative = f"{words.change(found.relative)} {'*' if found.large else ' '}" if found.measured_bytes else ""
        rows.append((label, words.size(found.forecast_bytes), words.size(found.measured_bytes), relative))
    return ("phase", "forecast", "measured", "difference"), rows


def html(forecast: Forecast) -> str:
    """The forecast for a notebook: its tables and its plot, as HTML."""
    plot = ""
    if forecast.curve:
        from finetune.report import memory_plot  # imports matplotlib, which text output does not need

        plot = base64.b64encode(memory_plot.forecast(forecast)).decode()
    return pages.fragment("forecast.html.j2", **_values(forecast, ()), curves=[], plot=plot)


def page(forecast: Forecast, found: Sequence[tuple[Lever, Forecast]], title: str) -> str:
    """The forecast and the levers as a self-contained HTML document."""
    chart = step_curve.chart(forecast)
    return pages.page(title, "forecast.html.j2", chart, **_values(forecast, found), plot="")


def _values(forecast: Forecast, found: Sequence[tuple[Lever, Forecast]]) -> dict[str, object]:
    """The values for the template."""
    return {
        "verdict": words.verdict(forecast),
        "facts": [*_settings(forecast).items(), *_costs(forecast).items()],
        "categories": _bars(forecast),
        "phases": _phases_table(forecast),
        "levers_title": _levers_title(found) if found else "",
        "levers": _levers_table(found),
    }


# -- contents ----------------------------------------------------------------------------------------------------------


def _settings(forecast: Forecast) -> dict[str, str]:
    """The settings of the forecast."""
    batch = forecast.batch
    micro_batches = forecast.tokens // batch.positions
    several = f", {words.count(micro_batches)} such micro-batches a step" if micro_batches > 1 else ""
    shown = {"batch": f"{words.batch(batch)}{several}; lengths from {batch.source}", "attention": forecast.attention}
    shown |= words.shorter(forecast)
    if forecast.sharing:
        shown["sharing"] = words.sharing(forecast.sharing)
    if forecast.device.expandable_segments:
        shown["allocator"] = "expandable segments"
    if forecast.mixture:
        shown["experts"] = words.mixture(forecast.mixture)
    return shown


def _bars(forecast: Forecast | Serving) -> list[tuple[str, float, str, str]]:
    """(name, fraction of the longest bar, size, share) of the categories present at the peak, and of their sum."""
    names = {**WORDS, KV_CACHE: "KV cache"}
    found = {name: size_bytes for key, name in names.items() if (size_bytes := forecast.categories.get(key, 0))}
    total, longest = sum(found.values()), max(found.values(), default=1)
    bars = [
        (name, size_bytes / longest, words.size(size_bytes), words.share(size_bytes / total))
        for name, size_bytes in found.items()
        if not words.is_nothing(size_bytes)
    ]
    return [*bars, ("at the peak", 0, words.size(forecast.needed_bytes), words.share(1))]


def _levers_title(found: Sequence[tuple[Lever, Forecast]]) -> str:
    enough = any(after.fits for _, after in found)
    return "what would make it fit" if enough else "what would make it smaller; none of these is enough"


def _levers_table(found: Sequence[tuple[Lever, Forecast]]) -> printing.Cells:
    rows = [
        (str(lever), words.size(after.needed_bytes), "yes" if after.fits else "no", lever.cost)
        for lever, after in found
    ]
    return ("change", "needs", "fits", "cost"), rows


def _phases_table(forecast: Forecast | Serving) -> printing.Cells:
    """Memory by phase. On a CPU nothing is reserved beyond the tensors, so there is only one column."""
    measures = ("tensors",) if forecast.device.type == "cpu" else ("allocated", "reserved")
    keys = ("allocated_bytes", "reserved_bytes")[: len(measures)]
    over = _over_budget(forecast)
    rows = [
        (
            phase,
            *(words.size(sizes[key]) for key in keys),
            *(["over the budget" if phase in over else ""] if over else []),
        )
        for phase, sizes in forecast.phases.items()
    ]
    return ("phase", *measures, *([""] if over else [])), rows


def _over_budget(forecast: Forecast | Serving) -> set[str]:
    """The phases that exceed the budget. A merge may be among them, although `fits` only considers training."""
    over, most_before, left = set(), 0, forecast.device.room_bytes
    for phase, sizes in forecast.phases.items():
        allocated, reserved = sizes["allocated_bytes"], sizes["reserved_bytes"]
        # Memory reserved by an earlier phase stays reserved, and is not attributed to this one.
        if allocated > left or (reserved > left and reserved > most_before):
            over.add(phase)
        most_before = max(most_before, reserved)
    return over


def _costs(forecast: Forecast) -> dict[str, str]:
    """The job's costs other than device memory."""
    facts = {}
    # On a CPU the headline is about host memory.
    if forecast.device.type != "cpu" and not words.is_nothing(forecast.host_bytes):
        facts["host memory"] = words.size(forecast.host_bytes)
    if not words.is_nothing(forecast.disk_bytes):
        facts["disk"] = words.size(forecast.disk_bytes)
    if forecast.flops:
        giga, seconds = forecast.flops / 1e9, forecast.seconds
        facts["step"] = (
            f"{words.count(giga) if giga >= 10 else f'{giga:.2g}'} GFLOP, "
            f"at least {f'{seconds:.3g}' if seconds < 100 else words.count(seconds)} s, "
            f"at most {words.count(forecast.tokens_per_second)} tokens/s"
        )
    return facts
