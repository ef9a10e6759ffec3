"""`finetune eval`: the base, the adapter and the merged model of a run, measured side by side.

    rows of the evaluation set ─▶ loss, or scores ────────────┐
    their questions ─▶ answers ─▶ metrics against references ─┼─▶ bootstrap over rows ─▶ eval.json, report.html
    tasks of lm-evaluation-harness ───────────────────────────┘

One model is in memory at a time; base and adapter are one model with the adapter switched off and on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, cast

import numpy as np

from finetune import objectives
from finetune.choices import config_of
from finetune.config import Config, DataSection, named
from finetune.config.field_types import pick
from finetune.data import prepare
from finetune.data.examples import shown
from finetune.data.media import TEXT_ALONE, Media, Shown
from finetune.data.prepare import Question
from finetune.errors import ConfigError, DataError, NumbersError
from finetune.evaluation.intervals import CONFIDENCE, RESAMPLES, SEED, Measured, compared
from finetune.evaluation.metrics import SOURCES, Metric, Source, find
from finetune.evaluation.model_results import ModelResults
from finetune.evaluation.pair_scores import ComparedPairs
from finetune.evaluation.run_models import EARLIER_ADAPTER, MODELS, model_of
from finetune.evaluation.sequence_scores import ScoredRows
from finetune.export.export_formats import FORMATS
from finetune.export.finished_run import FinishedRun
from finetune.generation import answering
from finetune.generation.settings import Settings
from finetune.model import bounds
from finetune.model.base import blaming_base
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import OBJECTIVES, cross_entropy
from finetune.report import reports
from finetune.report.scores import Scores
from finetune.report.terminal import Terminal
from finetune.runtime import libraries
from finetune.storage.files import write_json, write_lines
from finetune.storage.records import EvaluationRecord, ExportProof, Measure
from finetune.storage.rundir import Run, RunDirectory
from finetune.training.eval_loss import HeldOut

_INTERVAL = (
    f"{CONFIDENCE:.0%} confidence intervals by percentile bootstrap over rows ({RESAMPLES:,} resamples, seed {SEED}); "
    "of a difference, both models have the same rows."
)


@libraries.alone()
def evaluate(
    run: Run, *, data: str | PathLike[str] | None = None, metrics: Sequence[str] = (), tasks: Sequence[str] = (),
    models: Sequence[str] = (), limit: int | None = None, max_new_tokens: int = 256, batch_size: int = 16,
    apply_chat_template: bool = False, trust_remote_code: bool = False, terminal: Terminal | None = None,
) -> Scores:  # fmt: skip
    """Measure the models of a run, by default all it has, and write eval.json, eval_answers.jsonl and the report.

    The loss on the evaluation set, or on the rows of the file `data` in its place, is computed as during training; of
    a reward model and a classifier it is what they make of each row (`sequence_scores`). `metrics` (see `metrics.find`)
    score greedy answers to its questions, of at most `max_new_tokens`, and `tasks` are those of lm_eval, by name or
    YAML file, rendered with the chat template if `apply_chat_template`. `limit` is the number of questions, and of rows
    of each task. `trust_remote_code` allows Python code shipped with the run's base.

    Raises ConfigError for an unknown model, metric or task, DataError for a run without an evaluation set or without
    questions, and for a row that a metric cannot score, MachineError for a missing package, NumbersError for a loss
    that is not finite, and ArtifactError for weights, tokenizer or base that are damaged or not those of the run.
    """
    libraries.quiet()
    run = RunDirectory.open(run)
    for name, names in {"metrics": metrics, "tasks": tasks, "models": models}.items():
        if isinstance(names, str):
            raise ConfigError(f"`{name}` are a list, such as [{names!r}]")
    if limit is not None and limit < 1:
        raise ConfigError(f"`limit` must be at least 1, not {limit}")
    config = _config(run, data, answers=bool(metrics or tasks), trust_remote_code=trust_remote_code)
    chosen = _chosen(run, models, adapts=config.adapter.kind == "lora")
    # Read first, since one may be damaged.
    proofs = {form.folder: run.kept(form.folder) for name, form in FORMATS.items() if run.is_current(name)}
    exports = {
        folder: cast(ExportProof, {key: one for key, one in proof.items() if key in ExportProof.__annotations__})
        for folder, proof in proofs.items()
        if proof and "served" in proof
    }
    tokenizer = load_tokenizer(config.model, run.data(config.data))
    media = prepare.media_of(config.model, config.data, tokenizer)
    with_loss = _has_rows(config.data, tokenizer, media, needed=bool(metrics or data) or not tasks)  # tasks need none
    job = _EvaluationJob(run, config, with_loss=with_loss, media=media)
    settings, rules = Settings(max_new_tokens, batch_size=batch_size), [find(name) for name in metrics]
    if config.scorer:
        job.scored = ScoredRows.of(config.data, objectives.of(config), tokenizer)
    elif with_loss:
        job.compared = ComparedPairs.of(config, tokenizer)
    if metrics:
        job.questions = _Questions.of(config.data, tokenizer, media, rules, settings, limit)
    if tasks:
        job.tasks = SOURCES["tasks"](tasks, batch_size=batch_size, limit=limit, apply_chat_template=apply_chat_template)
    terminal = terminal or Terminal(quiet=True)  # a notebook shows what is returned

    results = job.by_model(chosen, terminal)
    measures = _measures(results)
    record: EvaluationRecord = {
        "steps": run.steps_done,
        "measures": measures,
        "interval": _INTERVAL,
        "notes": job.notes(results),
        "settings": {
            "models": chosen, "data": data and fspath(data), "metrics": list(metrics), "tasks": list(tasks),
            "limit": limit, "max_new_tokens": max_new_tokens, "batch_size": batch_size,
            "apply_chat_template": apply_chat_template, "confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED,
        },
        "gain_kept": _gain_kept(measures),
        "exports": exports,
    }  # fmt: skip
    scores = Scores(record)
    try:
        # In this order, a kill leaves no answers of one evaluation beside the figures of another.
        lines = job.lines(results)
        run.eval_answers_file.unlink(missing_ok=True)
        write_json(run.eval_file, record)
        if lines is not None:
            write_lines(run.eval_answers_file, lines)
        if run.report_file.exists():
            reports.write(run)
    finally:  # what was measured is shown though the disk is full, and kept though the output is
        terminal.show(scores)
    return scores


def _config(run: RunDirectory, data: str | PathLike[str] | None, *, answers: bool, trust_remote_code: bool) -> Config:
    """The config of the run, with the rows of `data` held out, if given; refuses `answers` of a model that has none."""
    held_out = None if data is None else fspath(data)
    config = config_of(run, held_out=held_out, trust_remote_code=trust_remote_code)
    if config.scorer and answers:
        raise ConfigError(
            f"{run.path} is a {config.scorer}, which gives scores and no answers; leave out `--metric` and `--task`"
        )
    return config


def _has_rows(section: DataSection, tokenizer: Any, media: Media, *, needed: bool) -> bool:
    """Whether there is an evaluation set. Raises DataError if one is `needed` and there is none."""
    held_out = (needed or prepare.is_here(section)) and prepare.holds_out(section, tokenizer, media)
    if needed and not held_out:
        raise DataError(
            f"no evaluation set (`data.eval: {named(section.eval)}`): set it to a file, or a larger "
            "`data.eval_share`, and train again; or give a file with `--data`; `--task` needs none"
        )
    return held_out


def _chosen(run: RunDirectory, models: Sequence[str], *, adapts: bool) -> list[str]:
    """The models to measure, in the order of MODELS; one that is served only if it is named. A run without an adapter
    trained the merged model itself.
    """
    for name in models:
        pick(MODELS, name, "model")
    there = ["base", "adapter", *(["merged"] if adapts and run.merged.exists() else [])]
    return [name for name in MODELS if name in (models or there)]


@dataclass
class _Questions:
    """The questions of the evaluation set, whose answers `metrics` score, and what is to be noted of them.

    `too_long`: questions that leave no position for an answer, one for each model. `beyond`: answers that leave the
    positions of the base.
    """

    section: DataSection
    media: Media
    metrics: list[Metric]
    settings: Settings
    rows: list[Question]
    too_long: int = 0
    beyond: int = 0

    @classmethod
    def of(
        cls, section: DataSection, tokenizer: Any, media: Media, metrics: list[Metric], settings: Settings,
        limit: int | None,
    ) -> _Questions:  # fmt: skip
        """Read the questions, and try each metric on a reference, before any model is loaded. Raises DataError."""
        rows = list(itertools.islice(prepare.questions(section, tokenizer, media), limit))
        if not rows:
            raise DataError(
                "no row of the evaluation set ends with an answer to compare with; metrics need conversations without "
                "tools, or prompts with completions"
            )
        row, _, reference = rows[0]
        for metric in metrics:
            metric.score(reference, reference, row.location, row.fields)
        return cls(section, media, metrics, settings, rows)

    def score(self, results: ModelResults, model: Any, tokenizer: Any) -> None:
        """Add a model's answers and their scores to its results."""
        positions = bounds.table_size(model) or math.inf
        ids = [answering.prompt_ids(one.prompt, tokenizer, self.section.control_tokens) for one in self.rows]
        # Training rows are truncated, questions are not.
        fits = [len(prompt) < positions for prompt in ids]
        self.rows = list(itertools.compress(self.rows, fits))
        self.too_long += len(fits) - len(self.rows)
        if not self.rows:
            raise DataError(f"every question takes all of the base's {positions} positions; shorten them")
        prompts = list(itertools.compress(ids, fits))
        shown = Shown.by([one.prompt for one in self.rows], self.media)
        results.answers = list(answering.answers(model, tokenizer, prompts, self.settings, shown=shown))
        known = bounds.positions(model.config) or math.inf
        self.beyond += sum(len(ids) + each.tokens > known for ids, each in zip(prompts, results.answers, strict=True))
        for metric in self.metrics:
            results.scores[metric.name] = scores = [
                metric.score(answer.text, reference, row.location, row.fields)
                for (row, _, reference), answer in zip(self.rows, results.answers, strict=True)
            ]
            results.add(metric.name, Measured.mean(scores), "higher")

    def notes(self, by_model: dict[str, ModelResults]) -> list[str]:
        """Remarks on questions and answers for readers of the table."""
        notes = []
        if self.too_long:
            notes.append(f"{self.too_long} questions were left out: they leave no position for an answer.")
        if self.beyond:
            notes.append(
                f"{self.beyond} answers leave the positions that the base was made for, and may make no sense there."
            )
        cut = {name: sum(not answer.ended for answer in one.answers) for name, one in by_model.items()}
        if any(cut.values()):
            counts = ", ".join(f"{number} of the {name}" for name, number in cut.items())
            notes.append(
                f"Of {len(self.rows)} answers each, these were cut off at {self.settings.max_new_tokens} tokens: "
                f"{counts} (--max-new-tokens)."
            )
        return notes

    def lines(self, by_model: dict[str, ModelResults]) -> list[dict[str, Any]]:
        """Each question with the answers and their scores by model."""
        return [
            {
                "row": row.location,
                "question": shown(prompt),
                "reference": reference,
                "answers": {name: one.answers[at].text for name, one in by_model.items()},
                "scores": {
                    metric.name: {name: one.scores[metric.name][at] for name, one in by_model.items()}
                    for metric in self.metrics
                },
            }
            for at, (row, prompt, reference) in enumerate(self.rows)
        ]


@dataclass
class _EvaluationJob:
    """The measurements of each model; the loss is among them if there is an evaluation set.

    `media` is what its rows may show.
    """

    run: RunDirectory
    config: Config
    with_loss: bool
    media: Media = TEXT_ALONE
    questions: _Questions | None = None
    tasks: Source | None = None
    scored: ScoredRows | None = None
    compared: ComparedPairs | None = None

    def by_model(self, chosen: list[str], terminal: Terminal) -> dict[str, ModelResults]:
        """The results of each chosen model, loaded in turn. The adapter comes first, since it may be damaged."""
        config, finished = self.config, FinishedRun(self.run, self.config)
        results: dict[str, ModelResults] = {}

        def measure(name: str, model: Any, tokenizer: Any) -> None:
            terminal.evaluating(name)
            with blaming_base(config.model):
                results[name] = self.measure(model, tokenizer)

        both = {"base", "adapter"} <= {*chosen}
        if self.compared and self.compared.needs_reference and not both:
            self.compared.score_reference(HeldOut(*model_of(finished, "base"), config))
        if config.adapter.kind == "lora" and both:
            model, tokenizer = model_of(finished, "adapter")
            measure("adapter", model, tokenizer)
            with model.disable_adapter():
                measure("base", model, tokenizer)
            del model
        for name in [name for name in reversed(chosen) if name not in results]:
            libraries.return_freed_memory()
            measure(name, *model_of(finished, name))
        return {name: results[name] for name in chosen}

    def measure(self, model: Any, tokenizer: Any) -> ModelResults:
        held_out = HeldOut(model, tokenizer, self.config)
        if self.scored:
            return self.scored.measure(held_out)
        results = ModelResults()
        if self.compared:
            results = self.compared.measure(held_out)
        elif self.with_loss:
            rows, _ = prepare.prepare_held_out(self.config.data, tokenizer, self.media)
            nats, by_row = held_out.loss(rows)
            if not math.isfinite(nats):
                raise NumbersError(
                    f"the held-out loss is {nats}: run `finetune doctor {self.run.quoted}` to find weights that are "
                    "not finite"
                )
            results.add("loss", Measured(nats, by_row.numpy()), "lower")
        if self.questions:
            self.questions.score(results, model, tokenizer)
        if self.tasks:
            for one in self.tasks.run(model, tokenizer):
                better = one.higher_is_better
                results.add(one.name, one.measured, None if better is None else "higher" if better else "lower")
        return results

    def notes(self, by_model: dict[str, ModelResults]) -> list[str]:
        """Remarks for readers of the table, besides the explanation of its intervals."""
        notes = self.scored.notes() if self.scored else []
        if self.compared:
            notes += self.compared.notes(by_model)
        elif self.with_loss and not self.scored:
            name = self.config.training.objective
            objective = OBJECTIVES.get(name)
            if objective is not None and objective.evaluated is not cross_entropy:  # the run's eval loss is another one
                also = "; answers that are not to be preferred count like the others" if objective.reference else ""
                notes.append(
                    "The loss is the cross-entropy of the trained tokens, not the eval loss of "
                    f"`training.objective: {name}`{also}."
                )
        if not prepare.is_here(self.config.data):
            notes.append("The loss was not measured: the rows were given from Python and are not kept on disk.")
        if "merged" in by_model and self.config.adapter.kind == "lora" and not self.run.is_merged:
            notes.append(EARLIER_ADAPTER)
        if self.tasks:
            notes.append("Bounds of tasks' metrics that are no mean over rows are from lm_eval's standard error.")
        return notes + (self.questions.notes(by_model) if self.questions else [])

    def lines(self, by_model: dict[str, ModelResults]) -> list[dict[str, Any]] | None:
        """The lines of eval_answers.jsonl: questions with answers, or rows that the models score; None for neither."""
        if self.scored:
            return self.scored.lines(by_model)
        return self.questions.lines(by_model) if self.questions else None


def _gain_kept(measures: list[Measure]) -> dict[str, float]:
    """The share of training's reduction of the base's loss that each other model keeps.

    Empty without the base and the adapter, or if training may not have reduced the loss.
    """
    losses: dict[str, Any] = next((one["models"] for one in measures if one["name"] == "loss"), {})
    if not losses.keys() >= {"base", "adapter"}:
        return {}
    gained = {name: figure["difference"] for name, figure in losses.items() if name != "base"}
    if gained["adapter"]["high"] is None or gained["adapter"]["high"] >= 0:
        return {}
    return {name: one["value"] / gained["adapter"]["value"] for name, one in gained.items() if name != "adapter"}


def _measures(by_model: dict[str, ModelResults]) -> list[Measure]:
    first = next(iter(by_model.values()))
    made: list[Measure] = []
    for name, one in first.measured.items():
        models = {model: each.measured[name] for model, each in by_model.items()}
        rows = None if one.rows is None else len(one.rows)
        made.append({"name": name, "better": first.better[name], "rows": rows, "models": compared(models)})
        if name == "loss":
            perplexity = compared(models, np.exp)
            made.append({"name": "perplexity", "better": "lower", "rows": rows, "models": perplexity})
    return made
