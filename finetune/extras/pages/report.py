"""The report of a run: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.config import Config, dump, named
from finetune.errors import ConfigError
from finetune.forms import FORMS
from finetune.report import curves, data_view, forecast_view, view, words
from finetune.report.figures import Figures
from finetune.report.result import result_rows
from finetune.report.scores import Scores
from finetune.runtime.memory_monitor import headline
from finetune.storage.files import write_text
from finetune.storage.records import DataFacts
from finetune.storage.rundir import RunDirectory

# Events whose facts have a section of their own.
_SHOWN_ELSEWHERE = {"trained", "finished", "merged"}

# The names of some keys of events on the page; the others are as in the file.
_NAMES = {"held_seconds": "training waited", "world_size": "ranks", "learns": "rows of kind"}

# A long run saves thousands of times; the page shows this many events of its start, and as many of its end.
_EVENTS = 100

# The files that a run may have beside its report, each with its description.
_FILES = {
    "adapter": "the adapter, as PEFT reads it",
    "merged": "the merged model, as transformers and vLLM read it",
    "plain-adapter": "the adapter for vLLM, SGLang and llama.cpp",
    "gguf": "the model for llama.cpp",
    "ollama": "the model for Ollama",
    **{
        form.name: f"the model in {form.words}, for vLLM and SGLang"
        for form in sorted(FORMS.values(), key=lambda form: form.roundoff)
        if form.is_of_safetensors
    },
    "config.yaml": "every setting, which reproduces the run",
    "metrics.jsonl": "each step and evaluation",
    "events.jsonl": "what happened, and when",
    "forecast.json": "memory, forecast and measured",
    "data.json": "the data in numbers, and its first rows",
    "data.jsonl": "rows that were dropped or changed",
    "answers.json": "sample answers",
    "eval.json": "base, adapter and merged model side by side",
    "eval_answers.jsonl": "the answers that were scored",
    "environment.json": "versions and devices",
    "training.png": "loss and memory as a picture",
    "checkpoints": "from which the run can be continued",
}


def write(run: RunDirectory, *, plot: bool = False) -> Path:
    """Write the report of the run as currently on disk, finished or not; with `plot`, that is drawn first.

    Returns the report's path. Raises ArtifactError for damaged files.
    """
    if plot:
        from finetune.report import plots  # imports matplotlib

        plots.training(run)
    figures = Figures.read(run)
    environment, data = run.environment(), run.data_facts()
    try:
        config, settings = run.config(), ""
    except ConfigError as error:  # written by another version; its results can still be shown
        config, settings = None, f"config.yaml cannot be read: {error}"
    forecast = run.forecast()
    differences = forecast["differences"] if forecast else []
    samples: list[list[data_view.SpeltRow]] = []
    if data:  # in groups that stand beside each other
        samples = data_view.spelt(data_view.together(data["samples"], [*data["train"].get("segments", {})]))
    events = [*map(_event, figures.events)]
    if (left_out := len(events) - 2 * _EVENTS) > 0:
        events[_EVENTS:-_EVENTS] = [("", f"{words.count(left_out)} more in events.jsonl", "", "")]
    document = view.document(
        run.path.name,
        "run.html.j2",
        curves.of_run(figures),
        trained=figures.trained,
        plot=run.plot_file.name if run.plot_file.exists() else "",
        job=_job(figures, config, data, environment),
        results=result_rows(run, figures),
        compared=forecast_view.compared(differences),
        large=forecast_view.LARGE if any(one.measured_bytes and one.large for one in differences) else "",
        process=forecast_view.process(forecast["needed_bytes"], figures.peaks) if forecast and differences else "",
        peaks=words.peak_table(figures.peaks),
        scores=Scores.read(run),
        answers=run.answers(),
        samples=samples,
        proof=run.merge_proof(),
        kept=[(f"{name}/", lost) for name in _FILES if (lost := words.served(run.kept(name) or {}))],
        settings=dump(config, defaults=False) if config else settings,
        files=[
            (f"{name}/" if (run.path / name).is_dir() else name, what)
            for name, what in _FILES.items()
            if (run.path / name).exists()
        ],
        events=events,
        environment=list(_flat(environment or {})),
    )
    write_text(run.report_file, document)
    return run.report_file


# -- the top -----------------------------------------------------------------------------------------------------------


def _job(
    figures: Figures, config: Config | None, data: DataFacts | None, environment: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """The job, its data and its device: (name, fact)."""
    facts: dict[str, str] = {}
    rows: list[str] = []
    if config:
        facts = {
            "base": words.base(config.model, config.quantization, config.training.precision),
            "adapter": words.adapter(config.adapter),
        }
        rows.append(named(config.data.train))
    if data:
        train, held_out = data["train"], data["eval"]
        rows += [
            f"{words.count(train['rows'])} rows, {words.count(train['tokens'])} tokens",
            f"{words.share(train['trained_tokens'] / max(train['tokens'], 1))} of them trained",
            f"{words.count(held_out['rows'])} row{'s' * (held_out['rows'] != 1)} held out"
            if held_out
            else "nothing held out",
        ]
    if rows:
        facts["data"] = ", ".join(rows)
    if config:
        facts["training"] = words.training(config.training, config.optimizer.kind)
        if figures.trained and figures.steps > (config.training.max_steps or figures.steps):
            facts["training"] += f"; an earlier start had done {words.count(figures.steps)} by then"
    changes = []
    for event in figures.events:
        if event["event"] == "schedule_changed":
            (then, now), (before, after) = event["steps"], event["learning_rate"]
            changes.append(
                f"of {words.count(then)} steps until step {words.count(event['step'])}, then of {words.count(now)}: "
                f"the learning rate went from {before:.2e} to {after:.2e}"
            )
    if changes:
        facts["schedule"] = "; ".join(changes)
    if environment:
        several = f"{words.count(figures.processes)} x " if figures.processes > 1 else ""
        facts["device"] = several + words.device(environment, environment["device"]["type"])
    return list(facts.items())


# -- the rest ----------------------------------------------------------------------------------------------------------


def _event(event: dict[str, Any]) -> tuple[str, ...]:
    """(time, event, step, details)."""
    time = datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    details = () if event["event"] in _SHOWN_ELSEWHERE else (_fact(key, value) for key, value in event.items() if value)
    return time, event["event"].replace("_", " "), str(event.get("step", "")), ", ".join(filter(None, details))


def _fact(key: str, value: Any) -> str:
    """One key of an event as text; empty for keys with their own column."""
    if key in ("time", "event", "step"):
        return ""
    if key == "memory":
        peaks = value if isinstance(next(iter(value.values())), dict) else {"": value}
        return f"peak memory {words.size(headline(peaks))}"
    if key == "seconds" or key.endswith("_seconds"):
        return f"{_NAMES.get(key, '')} {words.significant(value, 2)} s".lstrip()
    return f"{_NAMES.get(key, key.removesuffix('_bytes').replace('_', ' '))} {_amount(key, value)}"


def _amount(key: str, value: Any) -> str:
    """A value formatted by its key; a list holds the values before and after a change, except one of problems."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_amount(name, one)}" for name, one in value.items())
    if isinstance(value, list):
        return ("; " if key == "problems" else " → ").join(_amount(key, one) for one in value)
    if isinstance(value, float):
        return words.significant(value)
    is_size = key.endswith("_bytes") and type(value) is int
    return words.size(value) if is_size else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested values as (name, text), with the names of all levels joined."""
    for key, value in values.items():
        name = prefix + key.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, f"{name} ")
        else:
            yield name, "unknown" if value is None else _amount(key, value)
