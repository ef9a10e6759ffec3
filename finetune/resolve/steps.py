"""The steps that derive a job's config, each run once and in order: what was asked becomes what holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.config import Config, loaded
from finetune.data import prepare, sources
from finetune.data.prepare import Prepared
from finetune.errors import ArtifactError, FinetuneError, ForecastError, OutOfMemoryError
from finetune.model import bounds, precision, served
from finetune.model.base import load_architecture
from finetune.model.build import blueprint
from finetune.model.distributed import context
from finetune.model.source import catalog, prequantized
from finetune.model.source.locate import at_hand
from finetune.model.source.tokenizer import load_tokenizer
from finetune.model.structure.quantization import changes_to
from finetune.objectives import OBJECTIVES, contract
from finetune.report import words
from finetune.resolve import earlier
from finetune.resolve.job import Job, Step, Stop
from finetune.resolve.machine import Machine, NamedMachine
from finetune.runtime import libraries, ranks
from finetune.runtime.stages import stage
from finetune.storage.rundir import RunDirectory
from finetune.training import learning_rate as rates
from finetune.training import reference_scores
from finetune.training.checks import check
from finetune.training.oom_retry import named

if TYPE_CHECKING:  # a look at the data imports no forecast
    from finetune.forecast.job_forecast import Forecast
    from finetune.forecast.levers import Lever
    from finetune.forecast.plan import Fitted
    from finetune.resolve.planner import Planner

PATHS = ("model.name", "model.tokenizer", "data.train", "data.eval", "data.chat_template", "adapter.start_from",
         "output.dir")  # fmt: skip
"""Keys with paths, which may differ between machines; only rank 0 writes `output.dir`."""


# -- what the rows and the base allow ----------------------------------------------------------------------------------


def classes(job: Job) -> Job:
    """Name the classes of a classifier by its training rows; a plan without these takes two."""
    config = job.config
    if config.scorer != "classifier":
        return job
    if not job.machine.trains and not sources.at_hand(config.data.train):
        return job if config.model.labels else job.changed({"model.labels": ["0", "1"]})
    labels = prepare.classes(config.data)
    return job if labels == config.data.labels else job.changed({"data.labels": labels, "model.labels": labels})


def architecture(job: Job) -> Job:
    """Load the architecture; where it cannot be loaded, training says so before anything is read."""
    try:
        return replace(job, architecture=load_architecture(job.config.model, listed=not job.machine.trains))
    except FinetuneError:
        if not job.machine.trains:
            raise
        return job


def form(job: Job) -> Job:
    """Hold the base in the form that is served or published."""
    if job.architecture is None:
        return job
    changes, on_way = served.consequences(job.config, job.architecture)
    job = job.changed(changes)
    changes, on_form = prequantized.kept(job.config, job.architecture)
    job = job.changed(changes)
    notes = [on_way, on_form, served.note_on_experts(job.config, job.architecture)]
    return job.noting("output.serve", "\n".join(filter(None, notes)) or None)


def length(job: Job) -> Job:
    """Lower `data.max_length` to the positions of the base."""
    if job.architecture is None:
        return job
    changes, note = bounds.within_positions(job.config.model, job.config.data, job.architecture)
    return job.changed(changes).noting("data.max_length", note)


def new_tokens(job: Job) -> Job:
    """Add rows to the vocabulary for `data.new_tokens`."""
    if job.architecture is None or not job.config.data.new_tokens:
        return job
    changes, note = bounds.new_tokens(job.config.model, job.config.data, job.architecture)
    job = job.changed(changes).noting("data.new_tokens", note)
    return architecture(job) if job.config.model.vocabulary else job


# -- what this start and the machine decide ----------------------------------------------------------------------------


def precision_of_machine(job: Job) -> Job:
    """Choose `training.precision: auto`: the fastest that all devices compute natively."""
    arithmetic = job.machine.arithmetic  # of all ranks, which ask together
    if job.config.training.precision != "auto":
        return job
    name, why = precision.fastest(job.config, arithmetic)
    job = job.changed({"training.precision": name}, {"training.precision": why})
    return job.noting("training.precision", f"training.precision: {name} ({why})")


def in_one_precision(jobs: Sequence[Job]) -> list[Job]:
    """Jobs whose losses are compared, with a value for `training.precision: auto`: that of an earlier start of any of
    them, on whatever machine, or else the fastest that this machine and each job's other keys allow.
    """
    runs = [job.earlier for job in jobs if job.config.training.precision == "auto"]
    started = next((run.config().training.precision for run in runs if run and run.has_results), None)
    if started is None:
        return [precision_of_machine(job) for job in jobs]
    note = f"training.precision: {started} (as started)"
    return [
        job.changed({"training.precision": started}).noting("training.precision", note)
        if job.config.training.precision == "auto"
        else job
        for job in jobs
    ]


def learning_rate(job: Job) -> Job:
    """Choose `training.learning_rate: auto` by published sweeps, or say what these have against the job's own."""
    if job.machine.trains:
        rates.refuse_guess(job.config.training, job.config.optimizer)
    if job.architecture is None:
        return job
    job = job.noting("training.learning_rate", rates.evidence(job.config, job.architecture))
    if job.config.training.learning_rate != "auto":
        return job
    rate, why = rates.best_rate(job.config, job.architecture)
    return job.changed({"training.learning_rate": rate}, {"training.learning_rate": why})


# -- what the rows decide ----------------------------------------------------------------------------------------------


def data(job: Job) -> Job:
    """Read the rows for a plan, where they are at hand. Does nothing in a run, whose rows `recipe.inputs.gather` reads.

    What may be wrong with the adapter is reported before, as in training, and then what could not be exported.
    """
    if not isinstance(job.machine, NamedMachine):
        return job
    from finetune.export import publish
    from finetune.forecast.forecaster import attention

    config, base = job.config, job.architecture
    context.check(base, config.distributed.context)
    adapter = config.adapter
    rank = max([adapter.rank, *adapter.ranks.values()])
    above = rank > getattr(base.get_text_config(), "hidden_size", rank)  # the width of most layers
    given = adapter.targets != "all-linear" or adapter.extra_modules or adapter.ranks or adapter.init != "default"
    if above or given or adapter.start_from:
        implementation = attention(config.model, config.data, config.training.precision, base, job.machine.device)
        blueprint(config, base, implementation).check(adapter)
    rows = _at_hand(job)
    if rows and at_hand(config.model.name):
        run, tokenizer = RunDirectory(config.output.dir or "runs/unnamed"), load_tokenizer(config.model, config.data)
        publish.check_served(run, config, tokenizer, rows.kind)
    return replace(job, data=rows)


def _at_hand(job: Job) -> Prepared | None:
    """The tokenized data, where its files, if small, and the tokenizer are on this machine."""
    config, model = job.config, job.config.model
    builtin = model.weights == "random" and model.tokenizer is None and catalog.find(model.name)
    files = [config.data.train, *([] if config.data.eval in ("auto", "none") else [config.data.eval])]
    if not all(map(sources.at_hand, files)) or not (builtin or at_hand(model.tokenizer or model.name)):
        return None
    try:
        tokenizer = load_tokenizer(model, config.data)
    except ArtifactError:
        return None  # training reports a tokenizer that cannot be used
    bounds.check_tokenizer(tokenizer, job.architecture, model)
    rows = prepare.prepare(
        config.data, tokenizer, prepare.media_of(config.model, config.data, tokenizer, job.architecture)
    )
    contract.check_rows(config.training.objective, rows.layout, config.distributed.context)
    return rows


def reference(job: Job) -> Job:
    """Choose `preference.reference: auto`, for an objective that has a reference: what takes fewer seconds.

    Those are proportional to the rows that are scored: all of them once, or those of each step and evaluation. If
    equal, once: another start, or another run on these rows, scores none.
    """
    training, preference = job.config.training, job.config.preference
    objective = OBJECTIVES.get(training.objective)
    if objective is None or not objective.reference or preference.reference != "auto":
        return job
    once = job.config.caches_reference or reference_scores.in_step_share(training, job.data) >= 1
    return job.changed({"preference.reference": "cached" if once else "in_step"})


# -- what fits the memory ----------------------------------------------------------------------------------------------


def planner(job: Job) -> Job:
    """Make the planner of a plan, whose forecasts all its steps share; a run measures its device anew at each."""
    return job if job.machine.trains else replace(job, planner=_planner(job))


def quantization(job: Job) -> Job:
    """Choose `quantization.kind: auto`: the least with which the smallest step fits; the same on all ranks."""
    if job.config.quantization.kind != "auto":
        return job

    def of_first_rank() -> tuple[str, str]:
        if job.machine.trains:
            stage("forecasting how little quantization fits")
        return (job.planner or _planner(job)).least_quantized()

    kind, why = ranks.main_does(of_first_rank)
    job = job.noting("quantization.kind", f"quantization.kind: {kind} ({why})")
    job = job.changed(changes_to(kind), {"quantization.kind": why})
    return replace(job, planner=job.planner and job.planner.variant(job.config))


def memory(job: Job) -> Job:
    """Fit the settings that are `auto` to the device, and forecast the step; the same on all ranks.

    A run whose memory is not forecast, or cannot be, recomputes every layer. One that does not fit is refused with the
    levers that would help, if its config says so.
    """

    if isinstance(job.machine, NamedMachine):
        assert job.planner, "a job of which no weights are loaded has one"
        config, fitted = job.planner.resolve()
        return replace(job, config=config, planner=job.planner.variant(config), fitted=fitted)
    device = job.machine.device

    def of_first_rank() -> tuple[Config, Forecast | None]:
        if job.config.memory.check != "off" or not job.config.fitted:
            stage("forecasting the memory of a training step")
        planner = _planner(job)
        resolved, fitted = _fitted(planner)
        if fitted:
            job.say(fitted)
        if lowered := earlier.micro_batch(replace(job, config=resolved)):
            job.say(f"{named(lowered)}: in an earlier start of this run, memory ran out with more")
            resolved, fitted = resolved.changed(lowered), None
        check(resolved, device)  # again, with the micro-batch that was chosen
        return resolved, _forecast(job, planner.variant(resolved), fitted)

    planned, forecast = ranks.main_does(of_first_rank)
    local = {key: job.config.value(key) for key in PATHS}
    return replace(job, config=planned.changed(local), forecast=forecast)


def _planner(job: Job) -> Planner:
    """The planner of a job, for the device as it is now."""
    from finetune.resolve.planner import Planner

    card = job.machine.card(job.config.memory)
    card = card.without(job.kernels_off) if job.machine.trains else card
    return Planner(job.config, job.architecture, card, job.data, job.machine.gpus)


def _fitted(planner: Planner) -> tuple[Config, Fitted | None]:
    config = planner.config
    # Only the micro-batch cannot do without a forecast.
    unseen = config.changed({"memory.checkpointing": "all"}) if config.memory.checkpointing == "auto" else config
    if config.memory.check == "off" and unseen.fitted:
        return unseen, None
    try:
        return planner.resolve()
    except ForecastError:
        if config.memory.check == "refuse" or not unseen.fitted:
            raise
        return unseen, None


def _forecast(job: Job, planner: Planner, fitted: Fitted | None) -> Forecast | None:
    refuses = planner.config.memory.check == "refuse"
    if planner.config.memory.check == "off":
        return None
    try:
        forecast = planner.with_reference(fitted.forecast if fitted else planner.forecast())
    except ForecastError as error:
        if refuses:
            raise
        job.say(f"training continues without a forecast: {error}")
        return None
    if not forecast.fits:
        message = does_not_fit(forecast, planner.levers(forecast))
        if refuses:
            raise OutOfMemoryError(f"{message}\nTo train anyway: memory.check=warn")
        job.say(message)
    return forecast


def does_not_fit(forecast: Forecast, levers: list[tuple[Lever, Forecast]]) -> str:
    """The message for a job that does not fit: by how much, with which batch, and what would help."""
    batch = forecast.batch
    lines = [
        f"the job does not fit {forecast.device.name}: it would take {words.size(forecast.needed_bytes)} of "
        f"{words.size(forecast.budget_bytes)}, at its largest batch ({words.batch(batch)}, from "
        f"{batch.source}). What would help:"
    ]
    for lever, after in levers:
        verdict = "fits" if after.fits else "does not fit yet"
        lines.append(f"  {lever}: {words.size(after.needed_bytes)}, {verdict} ({lever.cost})")
    return "\n".join(lines)


STEPS: dict[Stop, tuple[Step, ...]] = {
    "form": (classes, architecture, form),
    "base": (length, new_tokens),
    "machine": (earlier.as_started, precision_of_machine, learning_rate),
    "kernels": (earlier.own_kernels, earlier.kernels_off),
    "weights": (data, reference, planner, quantization),
    "memory": (memory,),
}
"""The steps up to each stop, in their order."""


def resolve(
    asked: Config | Job, machine: Machine | None = None, earlier: RunDirectory | None = None, *, until: Stop,
    say: Callable[[str | Fitted], None] | None = None,
) -> Job:  # fmt: skip
    """The job that was `asked` for on a machine, by default this one, resolved `until` a stop.

    A job that was resolved so far goes on from there: with its rows once they are read, or from the stop before with
    other kernels off. `earlier` is the directory of a run that may have had an earlier start. `say` takes each note as
    it arises, and what was fitted.
    """
    libraries.quiet()
    job = asked if isinstance(asked, Job) else Job(asked, loaded(asked))
    job = replace(
        job, machine=machine or job.machine, earlier=earlier or job.earlier, say=say or job.say, reached=until
    )
    stops = list(STEPS)
    first = stops.index(asked.reached) + 1 if isinstance(asked, Job) and asked.reached else 0
    for step in itertools.chain.from_iterable(STEPS[stop] for stop in stops[first : stops.index(until) + 1]):
        job = step(job)
    return job
