"""The report of a run: one HTML file that needs nothing but itself, and the part of it that notebooks show.

Every function returns markup; see `finetune.report.markup` for what comes from outside.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.measure.monitor import headline
from finetune.report import markup, words
from finetune.report.figures import MEASURES, Figures, measures
from finetune.storage import records
from finetune.storage.files import write_text
from finetune.storage.records import Answer
from finetune.storage.rundir import RunDirectory

# Events whose facts have a section of their own.
_TOLD_ELSEWHERE = {"trained", "finished", "merged"}


def write(run: RunDirectory) -> None:
    """Write the report of the run as it stands on disk, finished or not."""
    write_text(run.report_file, _document(run))


def results(run: RunDirectory) -> str:
    """The results as a table, and the plot."""
    return _results(Figures.read(run)) + _plot(run)


def _document(run: RunDirectory) -> str:
    figures = Figures.read(run)
    body = "".join(
        [
            markup.section("Results", _results(figures)),
            markup.section("Course of training", _plot(run)),
            markup.section("Peak memory by phase", _peaks(figures)),
            markup.section("Answers to held-out questions", _answers(run)),
            markup.section("Merged model", _proof(run)),
            markup.section("Events (UTC)", _events(figures)),
            markup.section("Configuration", _preformatted(run.config_file)),
            markup.section("Environment", _environment(run)),
        ]
    )
    return markup.document(run.path.name, body)


# -- sections, empty where the run has nothing to say ------------------------------------------------------------------


def _results(figures: Figures) -> str:
    rows = [] if figures.trained else [("state", "not finished: what there is so far")]
    rows.append(("steps", words.count(figures.steps)))
    if figures.training:
        rows.append(("training loss of the last step", words.loss(figures.final_loss)))
    if figures.evaluations:
        rows += _held_out(figures)
    if figures.peaks:
        rows.append(("peak memory", words.size(headline(figures.peaks))))
    if figures.tokens_per_second is not None:
        rows.append(("tokens per second (median)", words.count(figures.tokens_per_second)))
    if figures.padding_share is not None:
        rows.append(("padding", words.share(figures.padding_share)))
    return markup.table((), rows, numbers=True)


def _held_out(figures: Figures) -> list[tuple[str, str]]:
    rows = [
        ("held-out loss of the base", words.loss(figures.base_eval_loss)),
        ("held-out loss of the last evaluation", words.loss(figures.final_eval_loss)),
    ]
    if best := figures.best_evaluation:
        rows.append((f"best held-out loss, at step {best['step']}", words.loss(best["eval_loss"])))
    if figures.relative_drop is not None:
        label = f"base to published weights (step {figures.exported_step})"
        rows.append((label, words.change(-figures.relative_drop)))
    return rows


def _plot(run: RunDirectory) -> str:
    if not run.plot_file.is_file():
        return ""
    image = base64.b64encode(records.read_bytes(run.plot_file)).decode()
    return f'<img alt="Loss and peak memory over the steps" src="data:image/png;base64,{image}">'


def _peaks(figures: Figures) -> str:
    peaks = figures.peaks
    columns = measures(peaks)
    rows = [
        (phase, *(words.size(peak[measure]) if measure in peak else "" for measure in columns))
        for phase, peak in peaks.items()
    ]
    return markup.table(("phase", *(MEASURES[measure] for measure in columns)), rows, numbers=True)


def _answers(run: RunDirectory) -> str:
    return "".join(
        f'<h3>{markup.escape(row["question"])}</h3><div class="answers">'
        + "".join(
            f'<div class="answer"><h4>{title}</h4><p>{markup.escape(text)}</p></div>' for title, text in _texts(row)
        )
        + "</div>"
        for row in run.answers()
    )


def _texts(row: Answer) -> list[tuple[str, str]]:
    """What there is to compare; the answer after training comes last."""
    texts = [("reference", row["reference"]), ("before training", row["before"])]
    return texts if row["after"] is None else [*texts, ("after training", row["after"])]


def _proof(run: RunDirectory) -> str:
    proof = run.merge_proof()
    if not proof:
        return ""
    rows = [
        ("distance of its logits from base plus adapter", f"{proof['error']:.3%}"),
        ("distance that rounding explains", f"{proof['bound']:.3%}"),
        ("distance by which the adapter moved the base", f"{proof['effect']:.3%}"),
        ("tokens with the same most likely successor", f"{proof['agreement']:.2%}"),
        ("compared on held-out", f"{words.count(proof['rows'])} rows, {words.count(proof['tokens'])} tokens"),
    ]
    return markup.table((), rows, numbers=True)


def _events(figures: Figures) -> str:
    rows = [
        (
            datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
            event["event"].replace("_", " "),
            str(event.get("step", "")),
            _facts(event),
        )
        for event in figures.events
    ]
    return markup.table(("time", "event", "step", ""), rows)


def _facts(event: dict[str, Any]) -> str:
    """What an event says besides when, what and at which step, as words."""
    if event["event"] in _TOLD_ELSEWHERE:
        return ""
    return ", ".join(
        _fact(key, value) for key, value in event.items() if key not in ("time", "event", "step") and value
    )


def _fact(key: str, value: Any) -> str:
    if key == "memory":
        peaks = value if isinstance(next(iter(value.values())), dict) else {"": value}
        return f"peak memory {words.size(headline(peaks))}"
    if key == "seconds":
        return f"{value:.1f} s"
    return f"{key.removesuffix('_bytes')} {_amount(key, value)}"


def _amount(key: str, value: Any) -> str:
    """A value that only its key says something of."""
    is_size = key.endswith("_bytes") and type(value) is int and 0 <= value <= records.LARGEST_BYTES
    return words.size(value) if is_size else str(value)


def _preformatted(file: Path) -> str:
    return f"<pre>{markup.escape(records.read_bytes(file).decode(errors='replace'))}</pre>" if file.is_file() else ""


def _environment(run: RunDirectory) -> str:
    return markup.table((), _flat(run.environment() or {}))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested values as (name, text), the names of the levels joined."""
    for key, value in values.items():
        name = prefix + key.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, f"{name} ")
        elif value is None:
            yield name, "unknown"
        else:
            yield name, _amount(key, value)
