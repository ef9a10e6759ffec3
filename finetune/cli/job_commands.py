"""Commands on a job, given by its config: train, plan, and what prepares them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import finetune
from finetune.cli import options
from finetune.cli.output import (
    announce,
    give,
    give_page,
    importing,
    new_terminal,
    note,
    note_rows,
    print_json,
    read_or_not,
    wrote,
)
from finetune.cli.program import command, refusing
from finetune.config import located
from finetune.errors import ConfigError, OutOfMemoryError
from finetune.model.source import declared
from finetune.runtime import libraries
from finetune.runtime.stages import stage
from finetune.storage.files import amount, check_place

if TYPE_CHECKING:
    from finetune.config import Config
    from finetune.forecast.plan import Plan
    from finetune.resolve import Job


@command
def train(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run aside and start over.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train as the config says, or resume an interrupted run."""
    with refusing():
        asked = finetune.load_config(config, overrides or [])
    with importing(f"train {config}"):
        from finetune import recipe
        from finetune.runtime import ranks
    result = recipe.train(asked, fresh=fresh, terminal=new_terminal(quiet=as_json))
    if as_json and ranks.is_main():
        print_json(result.summary())


@command
@read_or_not()
def data(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    page: options.Page = None,
    as_json: options.Json = False,
) -> None:
    """Show the data as the model sees it. What is trained, and what is padding; no GPU or weights needed."""
    asked = finetune.load_config(config, overrides or [])
    doing = f"data of {config}"
    if declared.leaves_rows_alone(asked):
        stage(f"{doing}: tokenizing the rows")
    else:
        with importing(doing, ", then tokenizing the rows"):
            from finetune import resolve  # noqa: F401
    give_page(finetune.inspect_data(asked), as_json, page)


@command
@read_or_not()
def plan(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    gpu: options.GpuName = None,
    gpus: options.Gpus = 1,
    picture: Annotated[Path | None, options.file("--picture", "Draw memory over the step as a PNG.")] = None,
    page: options.Page = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Forecast answers instead: weights, KV cache, working memory.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="With --inference: prompts at a time.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="With --inference: tokens of a prompt and its answer; by default data.max_length."),
    ] = None,
    cache: options.CacheName = "dynamic",
    as_json: options.Json = False,
) -> None:
    """Forecast the memory of a training step, or of answers. By phase and purpose; no GPU or weights needed."""
    if not inference and (batch, context, cache) != (1, None, "dynamic"):
        raise ConfigError("--batch, --context and --cache are for a forecast of answers: add --inference")
    if inference and (picture or page):
        raise ConfigError("--picture and --html show a training step; leave out --inference")
    if inference and gpus > 1:
        raise ConfigError("--gpus share a training step, while one GPU generates answers; leave one of both out")
    asked = finetune.load_config(config, overrides or [])
    job = asked if as_json else announce(f"plan of {config}", asked, gpu)
    if inference:
        fits = _plan_answers(job, gpu, batch, context, cache, as_json)
    else:
        fits = _plan_training(asked, job, gpu, gpus, picture, page, as_json)
    if not fits:
        sys.exit(OutOfMemoryError.exit_code)


def _plan_answers(
    job: Config | Job, gpu: str | None, rows: int, context: int | None, cache: str, as_json: bool
) -> bool:  # fmt: skip
    """Print the forecast of answers, and return whether they fit."""
    with libraries.importing():
        from finetune.report.forecast_view import ServingView
        from finetune.resolve import planning
    forecast = planning.answers(job, gpu, rows=rows, context=context, cache=cache)
    give(ServingView(forecast), as_json)
    return forecast.fits


def _plan_training(
    asked: Config, job: Config | Job, gpu: str | None, gpus: int, picture: Path | None, page: Path | None, as_json: bool
) -> bool:
    """Print, draw and write the forecast of a training step, and return whether it fits."""
    from finetune.forecast import kept_plan
    from finetune.report.forecast_view import PlanView

    def made() -> Plan:
        with libraries.importing():
            from finetune.resolve import planning
        return planning.plan(job, gpu, gpus)

    planned = kept_plan.get(asked, gpu, gpus, made)
    view = PlanView(planned)
    if not as_json:
        note_rows(asked.data)
        said = planned.why_quantized or asked.output.serve  # already said in the header
        if (kind := planned.config.quantization.kind) != asked.quantization.kind and not said:
            note(f"quantization.kind: {kind}, the form that `{asked.model.name}` is published in")
        if planned.config.output.way == "rounded":
            from finetune.export.rounding import rounded_run

            if rounding := rounded_run.planned_bytes(planned.config, view.forecast.device.type):
                note(f"rounding with the training rows, apart from training, takes {amount(rounding)}")
    if picture:
        view.draw(picture)
        wrote(picture, as_json)
    give_page(view, as_json, page)
    return view.forecast.fits


@command
@read_or_not()
def fit(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    gpu: options.GpuName = None,
    gpus: options.Gpus = 1,
    output: Annotated[Path | None, options.file("--output", "Where to write the fitted config.")] = None,
    as_json: options.Json = False,
) -> None:
    """Find the fastest setting that fits. At the same global batch; written as a config."""
    asked = finetune.load_config(config, overrides or [])
    target = output or Path(f"{located(config).stem}_fitted.yaml")
    check_place(target)
    job = asked if as_json else announce(f"fit of {config}", asked, gpu)
    with libraries.importing():
        from finetune.report.forecast_view import FittedView
        from finetune.resolve import planning
    fitted, limits = planning.fit_with_limits(job, gpu, gpus)
    planning.write(fitted, target)
    if not as_json:
        note_rows(asked.data)
    give(FittedView(fitted, limits, target), as_json)
