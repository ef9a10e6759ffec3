"""The report of a run: one HTML file that needs nothing but itself, and the part of it that notebooks show.

Every function returns markup. Whatever comes from outside passes through `_escape`, most of it by way of `_table`.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.memory.monitor import headline
from finetune.report import words
from finetune.report.figures import MEASURES, Figures, measures
from finetune.rundir import RunDirectory, write_text

_STYLE = """
:root { color-scheme: light dark; --text: #1c2126; --soft: #66707a; --line: #d9dee3; --ground: #fff; --box: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ec; --soft: #98a2ac; --line: #39414a; --ground: #14181c; --box: #1d2329; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { margin: 1rem 0 0; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.25rem; border-bottom: 1px solid var(--line); }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
h4 { margin: 0; font-size: .85rem; color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.2rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: normal; }
tbody th { font-weight: normal; white-space: nowrap; }
.numbers td, .numbers thead th + th { text-align: right; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
pre, .answer { background: var(--box); border-radius: 6px; padding: .8rem; margin: 0; }
pre { overflow-x: auto; font-size: .9rem; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem; }
.answer p { margin: .3rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
"""

_ANSWERS = {"reference": "reference", "before": "before training", "after": "after training"}

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
    name = _escape(run.path.name)
    body = "".join(
        [
            f"<h1>{name}</h1>",
            _section("Results", _results(figures)),
            _section("Course of training", _plot(run)),
            _section("Peak memory by phase", _peaks(figures)),
            _section("Answers to held-out questions", _answers(run)),
            _section("Merged model", _proof(run)),
            _section("Events (UTC)", _events(figures)),
            _section("Configuration", _preformatted(run.config_file)),
            _section("Environment", _environment(run)),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


# -- sections, empty where the run has nothing to say ------------------------------------------------------------------


def _results(figures: Figures) -> str:
    rows = [("steps", words.count(figures.steps))]
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
    return _table((), rows, numbers=True)


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
    image = base64.b64encode(run.plot_file.read_bytes()).decode()
    return f'<img alt="Loss and peak memory over the steps" src="data:image/png;base64,{image}">'


def _peaks(figures: Figures) -> str:
    peaks = figures.peaks
    columns = measures(peaks)
    rows = [
        (phase, *(words.size(peak[measure]) if measure in peak else "" for measure in columns))
        for phase, peak in peaks.items()
    ]
    return _table(("phase", *(MEASURES[measure] for measure in columns)), rows, numbers=True)


def _answers(run: RunDirectory) -> str:
    return "".join(
        f'<h3>{_escape(row["question"])}</h3><div class="answers">'
        + "".join(
            f'<div class="answer"><h4>{title}</h4><p>{_escape(row.get(key, ""))}</p></div>'
            for key, title in _ANSWERS.items()
        )
        + "</div>"
        for row in _json(run.answers_file) or []
    )


def _proof(run: RunDirectory) -> str:
    proof = _json(run.merged / "merge.json")
    if not proof:
        return ""
    rows = [
        ("distance of its logits from base plus adapter", f"{proof['error']:.3%}"),
        ("distance that rounding explains", f"{proof['bound']:.3%}"),
        ("distance by which the adapter moved the base", f"{proof['effect']:.3%}"),
        ("tokens with the same most likely successor", f"{proof['agreement']:.2%}"),
        ("compared on held-out", f"{words.count(proof['rows'])} rows, {words.count(proof['tokens'])} tokens"),
    ]
    return _table((), rows, numbers=True)


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
    return _table(("time", "event", "step", ""), rows)


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
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes')} {words.size(value)}"
    if key == "seconds":
        return f"{value:.1f} s"
    return f"{key} {value}"


def _preformatted(file: Path) -> str:
    return f"<pre>{_escape(file.read_text(encoding='utf-8'))}</pre>" if file.is_file() else ""


def _environment(run: RunDirectory) -> str:
    return _table((), _flat(_json(run.environment_file) or {}))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested values as (name, text), the names of the levels joined."""
    for key, value in values.items():
        name = prefix + key.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, f"{name} ")
        elif value is None:
            yield name, "unknown"
        else:
            yield name, words.size(value) if key.endswith("_bytes") else str(value)


# -- markup ------------------------------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>\n" if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table of plain texts whose first column names the row; `numbers` aligns the others to the right."""
    lines = [
        f'<tr><th scope="row">{_escape(first)}</th>{"".join(f"<td>{_escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    ]
    if not lines:
        return ""
    cells = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in head)
    thead = f"<thead><tr>{cells}</tr></thead>" if head else ""
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="wide"><table{kind}>{thead}<tbody>{"".join(lines)}</tbody></table></div>'


def _escape(text: str) -> str:
    # JSON can hold half of a surrogate pair, which no file in UTF-8 can.
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
