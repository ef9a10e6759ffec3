"""The report of a run: one self-contained HTML file, and the part of it shown in notebooks."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.measure.monitor import headline
from finetune.report import pages, words
from finetune.report.figures import Figures, peak_table
from finetune.report.scores import Scores
from finetune.storage import records
from finetune.storage.files import write_text
from finetune.storage.rundir import RunDirectory

# Events whose facts have a section of their own.
_TOLD_ELSEWHERE = {"trained", "finished", "merged"}


def write(run: RunDirectory) -> None:
    """Write the report of the run as currently on disk, finished or not."""
    figures = Figures.read(run)
    document = pages.page(
        run.path.name,
        "run.html.j2",
        figures=figures,
        plot=_plot(run),
        peaks=peak_table(figures.peaks),
        scores=Scores.read(run),
        answers=run.answers(),
        proof=run.merge_proof(),
        events=[_event(event) for event in figures.events],
        config=_contents(run.config_file).decode(errors="replace"),
        environment=list(_flat(run.environment() or {})),
    )
    write_text(run.report_file, document)


def results(run: RunDirectory) -> str:
    """The results as a table, and the plot, as HTML."""
    return pages.fragment("results.html.j2", figures=Figures.read(run), plot=_plot(run))


def _plot(run: RunDirectory) -> str:
    return base64.b64encode(_contents(run.plot_file)).decode()


def _contents(file: Path) -> bytes:
    return records.read_bytes(file) if file.is_file() else b""


def _event(event: dict[str, Any]) -> tuple[str, ...]:
    """(time, event, step, details)."""
    time = datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    details = () if event["event"] in _TOLD_ELSEWHERE else (_fact(key, value) for key, value in event.items() if value)
    return time, event["event"].replace("_", " "), str(event.get("step", "")), ", ".join(filter(None, details))


def _fact(key: str, value: Any) -> str:
    """One key of an event as text; empty for keys with their own column."""
    if key in ("time", "event", "step"):
        return ""
    if key == "memory":
        peaks = value if isinstance(next(iter(value.values())), dict) else {"": value}
        return f"peak memory {words.size(headline(peaks))}"
    return f"{value:.1f} s" if key == "seconds" else f"{key.removesuffix('_bytes')} {_amount(key, value)}"


def _amount(key: str, value: Any) -> str:
    """A value formatted according to its key."""
    is_size = key.endswith("_bytes") and type(value) is int and 0 <= value <= records.LARGEST_BYTES
    return words.size(value) if is_size else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested values as (name, text), with the names of all levels joined."""
    for key, value in values.items():
        name = prefix + key.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, f"{name} ")
        else:
            yield name, "unknown" if value is None else _amount(key, value)
