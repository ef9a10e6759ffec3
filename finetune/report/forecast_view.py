"""A forecast as people read it: on a terminal or in a log, and in a notebook.

The first line is the answer; what follows says what the answer is made of. Nothing that is zero takes a line.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from rich.console import Console

from finetune.forecast.comparison import TOLD_ABOVE
from finetune.forecast.replay import WORDS, Forecast
from finetune.report import markup, printing, words

_OVER = "over the budget"
_IMAGE_STYLE = "max-width: 100%; height: auto; background: #fff"


def show(forecast: Forecast, console: Console) -> None:
    """Print the forecast: whether it fits, what the memory goes to, and what else a step takes."""
    printing.say(console, words.verdict(forecast), style="bold green" if forecast.fits else "bold red")
    printing.facts(console, _settings(forecast))
    printing.say(console, "")
    _bars(console, forecast)
    printing.say(console, "")
    printing.table(console, _phase_head(forecast), _phase_rows(forecast), texts=("",))
    if facts := _costs(forecast):
        printing.say(console, "")
        printing.facts(console, facts)


def levers(found: Sequence[tuple[str, int, bool, str]], console: Console) -> None:
    """Print what would make the job fit: (change, needed bytes, whether it fits then, what it costs) in each row."""
    if not found:
        return
    enough = any(fits for _, _, fits, _ in found)
    title = "what would make it fit" if enough else "what would make it smaller; none of these is enough"
    rows = [
        (change, words.size(needed_bytes), "yes" if fits else "no", cost) for change, needed_bytes, fits, cost in found
    ]
    printing.say(console, title, style="bold")
    printing.table(console, ("change", "needs", "fits", "cost"), rows, texts=("fits", "cost"))


def compare(rows: Sequence[tuple[str, int, int]], console: Console) -> None:
    """Print the forecast beside what was measured: (phase, forecast bytes, measured bytes) in each row."""
    if not rows:
        return
    told, far = [], False
    for phase, forecast_bytes, measured_bytes in rows:
        difference, mark = "", ""
        if measured_bytes:
            relative = forecast_bytes / measured_bytes - 1
            mark = " *" if abs(relative) > TOLD_ABOVE else "  "
            difference = words.change(relative) + mark
            far |= mark == " *"
        told.append((phase, words.size(forecast_bytes), words.size(measured_bytes), difference))
    printing.table(console, ("phase", "forecast", "measured", "difference"), told)
    if far:
        printing.say(console, f"* more than {TOLD_ABOVE:.0%} from what was measured")


def html(forecast: Forecast) -> str:
    """The forecast for a notebook: its tables and its picture, all in the markup itself."""
    return "".join(
        [
            f"<p><strong>{markup.escape(words.verdict(forecast))}</strong></p>",
            _html_table((), [*_settings(forecast).items(), *_costs(forecast).items()]),
            _html_table(
                ("at the peak", "size", "share"),
                [(name, words.size(size_bytes), words.share(share)) for name, size_bytes, share in _at_peak(forecast)],
            ),
            _html_table(_phase_head(forecast), _phase_rows(forecast)),
            _picture(forecast),
        ]
    )


# -- what there is to say ----------------------------------------------------------------------------------------------


def _settings(forecast: Forecast) -> dict[str, str]:
    """What the forecast is of."""
    experts = {"experts": words.mixture(forecast.mixture)} if forecast.mixture else {}
    grow = {"allocator": "expandable segments"} if forecast.device.expandable_segments else {}
    return {"batch": _batch(forecast), "attention": forecast.attention, **grow, **experts}


def _batch(forecast: Forecast) -> str:
    batch = forecast.batch
    micro_batches = forecast.tokens // (batch.rows * batch.tokens)
    told = words.batch(batch)
    if micro_batches > 1:
        told += f", {words.count(micro_batches)} such micro-batches a step"
    return f"{told}; lengths from {batch.source}"


def _at_peak(forecast: Forecast) -> list[tuple[str, int, float]]:
    """(name, bytes, share) of the categories that are there at the peak."""
    total = sum(forecast.categories.values())
    return [
        (name, forecast.categories[category], forecast.categories[category] / total)
        for category, name in WORDS.items()
        if not words.is_nothing(forecast.categories.get(category, 0))
    ]


def _phase_head(forecast: Forecast) -> tuple[str, ...]:
    """On a CPU tensors are all there is, and one column says it; the last column is there when it has something."""
    measures = ("tensors",) if forecast.device.type == "cpu" else ("allocated", "reserved")
    return ("phase", *measures, *([""] if _over_budget(forecast) else []))


def _phase_rows(forecast: Forecast) -> list[tuple[str, ...]]:
    over = _over_budget(forecast)
    measures = ("allocated_bytes",) if forecast.device.type == "cpu" else ("allocated_bytes", "reserved_bytes")
    return [
        (
            phase,
            *(words.size(sizes[measure]) for measure in measures),
            *([_OVER if phase in over else ""] if over else []),
        )
        for phase, sizes in forecast.phases.items()
    ]


def _over_budget(forecast: Forecast) -> set[str]:
    """The phases that go over the budget. A merge may be one, though `fits` speaks of the training alone."""
    over, most_before, left = set(), 0, forecast.device.room_bytes
    for phase, sizes in forecast.phases.items():
        allocated, reserved = sizes["allocated_bytes"], sizes["reserved_bytes"]
        # What an earlier phase reserved stays reserved, and is no fault of this one.
        if allocated > left or (reserved > left and reserved > most_before):
            over.add(phase)
        most_before = max(most_before, reserved)
    return over


def _costs(forecast: Forecast) -> dict[str, str]:
    """What the job takes besides the device's memory."""
    facts = {}
    # On a CPU the host's memory is the memory that the headline is about.
    if forecast.device.type != "cpu" and not words.is_nothing(forecast.host_bytes):
        facts["host memory"] = words.size(forecast.host_bytes)
    if not words.is_nothing(forecast.disk_bytes):
        facts["disk"] = words.size(forecast.disk_bytes)
    if forecast.flops:
        facts["step"] = (
            f"{_giga(forecast.flops)} GFLOP, at least {_seconds(forecast.seconds)}, "
            f"at most {words.count(forecast.tokens_per_second)} tokens/s"
        )
    return facts


def _giga(flops: int) -> str:
    giga = flops / 1e9
    return words.count(giga) if giga >= 10 else f"{giga:.2g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{words.count(seconds)} s"


# -- on a terminal or in a log -----------------------------------------------------------------------------------------


def _bars(console: Console, forecast: Forecast) -> None:
    """A bar for each category at the peak, and below them what they add up to."""
    rows = _at_peak(forecast)
    longest = max((size_bytes for _, size_bytes, _ in rows), default=1)
    told = [
        (name, size_bytes / longest, words.size(size_bytes), words.share(share)) for name, size_bytes, share in rows
    ]
    printing.bars(console, [*told, ("at the peak", 0, words.size(forecast.needed_bytes), words.share(1))])


# -- in a notebook -----------------------------------------------------------------------------------------------------


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        f'<tr><th scope="row" style="text-align: left">{markup.escape(first)}</th>'
        f"{''.join(f'<td>{markup.escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    ]
    names = "".join(f'<th scope="col">{markup.escape(name)}</th>' for name in head)
    return f"<table>{f'<thead><tr>{names}</tr></thead>' if head else ''}<tbody>{''.join(lines)}</tbody></table>"


def _picture(forecast: Forecast) -> str:
    if not forecast.curve:
        return ""
    from finetune.report import memory_plot  # with matplotlib, which a forecast in text need not wait for

    encoded = base64.b64encode(memory_plot.forecast(forecast)).decode()
    return f'<img alt="Memory over a step" style="{_IMAGE_STYLE}" src="data:image/png;base64,{encoded}">'
