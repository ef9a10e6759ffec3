"""The command line: commands and exit codes, no logic.

The names of `finetune` import their modules lazily, since their libraries take seconds to import. Each command loads
its config or opens its run first, so that errors there are reported at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import finetune
from finetune.config.field_types import pick
from finetune.errors import INTERRUPTED, ConfigError, FinetuneError, MachineError, OutOfMemoryError, Terminated
from finetune.export.export_formats import FORMATS
from finetune.export.gguf.gguf_types import TYPES, check
from finetune.inference.answer_settings import Settings
from finetune.inference.metrics import METRICS
from finetune.launch.targets import TARGETS
from finetune.model.attention.caches import CACHES
from finetune.report.visible import LINES, VisibleStream, visible
from finetune.runtime import libraries
from finetune.runtime.stages import stage

if TYPE_CHECKING:
    from finetune.config import Config
    from finetune.report.terminal import Terminal
    from finetune.report.view import PageView, View


app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Fine-tune a language model on the GPU you have: LoRA, QLoRA, measured memory, proven exports.",
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"finetune {importlib.metadata.version('finetune')}\n")
        raise typer.Exit


@app.callback()
def of_program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


_CHANGEABLE: set[str] = set()
"""The commands that take `section.key=value`."""


def command(
    work: Callable[..., None], name: str | None = None, shared: Mapping[str, inspect.Parameter] | None = None
) -> Callable[..., None]:
    """Make `work` a command, by default with its own name; all commands have `--debug`.

    `shared` are options that replace the `**` of `work`, except those that `work` declares itself.
    """

    @functools.wraps(work)
    def run(*, debug: bool, **given: Any) -> None:
        with errors_reported(debug):
            work(**given)

    own = dict(inspect.signature(work, eval_str=True).parameters)
    if shared:
        own.popitem()  # its `**`
        own = {**own, **shared, **own}
    if "overrides" in own:
        _CHANGEABLE.add(name or work.__name__)
    own["debug"] = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own.values()]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return app.command(name)(run)


# -- arguments and options that several commands have ----------------------------------------------------------------


def path(text: str) -> Path:
    """A file to write; a shell leaves the `~` of `--html=~/data.html` to the program."""
    return Path(os.path.expanduser(text))


def _file(option: str, help: str) -> Any:
    return typer.Option(option, parser=path, help=help)


def _listed(entries: Any) -> str:
    """The names of a table, each with its help."""
    return "; ".join(f"{name}: {entry.help}" for name, entry in entries.items())


def which(model: str) -> str:
    """Parse the name of a run's model."""
    if model not in ("base", "adapter", "merged"):
        raise typer.BadParameter(f"{model!r}: choose base, adapter or merged")
    return model


ConfigFile = Annotated[Path, typer.Argument(help="A config, such as configs/tiny_cpu.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, such as training.max_steps=20.")]
Run = Annotated[Path, typer.Argument(help="A run directory, such as runs/tiny_cpu.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the Python code that the run's base ships with, at its revision."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Page = Annotated[Path | None, _file("--html", "Also write it as an HTML page.")]
Gpu = Annotated[str | None, typer.Option(help="A card such as 'RTX 4090', a size such as 24GiB, auto or cpu.")]
Gpus = Annotated[int, typer.Option(min=1, max=1024, help="How many of them; the figures are those of one.")]
CacheName = Annotated[str, typer.Option("--cache", help=_listed(CACHES))]
Model = Annotated[str, typer.Option("--model", parser=which, metavar="NAME", help="base, adapter or merged.")]
MaxNewTokens = Annotated[int, typer.Option(min=1)]
System = Annotated[
    str | None, typer.Option(help="The system message; by default the one that all rows of the run share, '' is none.")
]


def options_of(settings: type) -> dict[str, inspect.Parameter]:
    """The fields of a dataclass that have help or limits, as options of a command."""
    hints = typing.get_type_hints(settings) | {"stop": list[str]}  # typer takes no other sequence
    return {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY,
            default=[] if field.default == () else field.default,
            annotation=Annotated[hints[field.name], typer.Option(**field.metadata)],
        )
        for field in dataclasses.fields(settings) if field.metadata
    }  # fmt: skip


# -- the commands ----------------------------------------------------------------------------------------------------


@command
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run aside and start over.")] = False,
    as_json: Json = False,
) -> None:
    """Train as the config says, or resume an interrupted run."""
    with _refusing():
        job = finetune.load_config(config, overrides or [])
    with _importing(f"train {config}"):
        from finetune import recipe
        from finetune.runtime import ranks
    result = recipe.train(job, fresh=fresh, terminal=_terminal(quiet=as_json))
    if as_json and ranks.is_main():
        _print_json(result.summary())


@command
def data(config: ConfigFile, overrides: Overrides = None, page: Page = None, as_json: Json = False) -> None:
    """Show the data as the model sees it. What is trained, and what is padding; no GPU or weights needed."""
    job = finetune.load_config(config, overrides or [])
    with _importing(f"data of {config}", ", then tokenizing the rows"):
        from finetune.data import inspection
        from finetune.report.data_view import DataView
    _give_page(DataView(inspection.inspect_data(job)), as_json, page)


@command
def init(
    model: Annotated[
        str | None, typer.Argument(help="The base: a directory, a hub name or builtin:tiny-llama.")
    ] = None,
    rows: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="A file, a folder or a data set of the hub.")
    ] = None,
    gpu: Gpu = None,
    other: Annotated[
        Path | None, _file("--from", "Translate this config of Axolotl, LLaMA-Factory or TRL instead.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="What the data's columns hold: prompt=Question,completion=Answer.")
    ] = None,
    output: Annotated[Path | None, _file("--output", "Where to write the config.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing, take guessed columns, and replace a file that is there.")
    ] = False,
) -> None:
    """Write a first config. It fits the model and the data to the card; what is missing is asked for."""
    from finetune.init import first_config

    first_config.create(
        model, rows, gpu, other, output, columns, yes=yes, say=lambda text: typer.echo(visible(text, LINES))
    )


@command
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Gpu = None,
    gpus: Gpus = 1,
    picture: Annotated[Path | None, _file("--picture", "Draw memory over the step as a PNG.")] = None,
    page: Page = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Forecast answers instead: weights, KV cache, working memory.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="With --inference: prompts at a time.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="With --inference: tokens of a prompt and its answer; by default data.max_length."),
    ] = None,
    cache: CacheName = "dynamic",
    as_json: Json = False,
) -> None:
    """Forecast the memory of a training step, or of answers. By phase and purpose; no GPU or weights needed."""
    if not inference and (batch, context, cache) != (1, None, "dynamic"):
        raise ConfigError("--batch, --context and --cache are for a forecast of answers: add --inference")
    if inference and (picture or page):
        raise ConfigError("--picture and --html show a training step; leave out --inference")
    if inference and gpus > 1:
        raise ConfigError("--gpus share a training step, while one GPU generates answers; leave one of both out")
    job = finetune.load_config(config, overrides or [])
    if not as_json:
        _announce(f"plan of {config}", job)
    if inference:
        fits = _plan_answers(job, gpu, batch, context, cache, as_json)
    else:
        fits = _plan_training(job, gpu, gpus, picture, page, as_json)
    if not fits:
        sys.exit(OutOfMemoryError.exit_code)


def _plan_answers(job: Config, gpu: str | None, rows: int, context: int | None, cache: str, as_json: bool) -> bool:
    """Print the forecast of answers, and return whether they fit."""
    with libraries.importing():
        from finetune.forecast import answer_memory
        from finetune.report.forecast_view import ServingView
    forecast = answer_memory.forecast(job, gpu, rows=rows, context=context, cache=cache)
    _give(ServingView(forecast), as_json)
    return forecast.fits


def _plan_training(
    job: Config, gpu: str | None, gpus: int, picture: Path | None, page: Path | None, as_json: bool
) -> bool:
    """Print, draw and write the forecast of a training step, and return whether it fits."""
    with libraries.importing():
        from finetune.forecast import planning
        from finetune.report.forecast_view import PlanView
    view = PlanView(planning.plan(job, gpu, gpus))
    if not as_json:
        _note_missing(job)
    if picture:
        view.draw(picture)
        _wrote(picture, as_json)
    _give_page(view, as_json, page)
    return view.forecast.fits


@command
def fit(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Gpu = None,
    gpus: Gpus = 1,
    output: Annotated[Path | None, _file("--output", "Where to write the fitted config.")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest setting that fits. At the same global batch; written as a config."""
    job = finetune.load_config(config, overrides or [])
    if not as_json:
        _announce(f"fit of {config}", job)
    with libraries.importing():
        from finetune.forecast import planning
        from finetune.report.forecast_view import FittedView
    fitted, limits = planning.fit_with_limits(job, gpu, gpus)
    if not as_json:
        _note_missing(job)
    target = output or Path(f"{config.stem}_fitted.yaml")
    planning.write(fitted, target)
    _give(FittedView(fitted, limits, target), as_json)


@command
def merge(
    run: Run,
    onto: Annotated[
        str | None,
        typer.Option(help="16-bit: the base as published, the default; quantized: as it was quantized for training."),
    ] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Merge the adapter, and prove the result. It must equal the base with the adapter; the same command resumes it."""
    opened = finetune.RunDirectory.open(run)
    with _importing(f"merge {run}"):
        prove = finetune.merge
    proof = prove(opened, onto=onto, trust_remote_code=trust_code, terminal=_terminal(quiet=as_json))
    if as_json:
        _print_json(proof)


@command
def export(
    run: Run,
    format: Annotated[str, typer.Option("--to", help=_listed(FORMATS))] = "",
    trust_code: TrustCode = False,
    as_json: Json = False,
    type: Annotated[str, typer.Option(help=_listed(TYPES))] = "f16",
    push: Annotated[str | None, typer.Option(help="Upload it to this repository of the hub, private if new.")] = None,
) -> None:
    """Export for the programs that serve a model, and prove it. What was written must equal what was trained."""
    _chosen("--to", format, FORMATS)
    pick(FORMATS, format, "export format")
    check(type)
    opened = finetune.RunDirectory.open(run)
    with _importing(f"export {run}"):
        write = finetune.export_model
    terminal = _terminal(quiet=as_json)
    record = write(opened, format, type=type, push=push, trust_remote_code=trust_code, terminal=terminal)
    if as_json:
        _print_json(record)


@functools.partial(command, shared=options_of(Settings))
def generate(
    run: Run,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.")] = None,
    file: Annotated[Path | None, _file("--file", "Prompts: text lines, or rows with `prompt` or `messages`.")] = None,
    model: Model = "adapter",
    system: System = None,
    batch: Annotated[int, typer.Option(min=1, help="How many prompts at a time.")] = 16,
    trust_code: TrustCode = False,
    as_json: Json = False,
    **answers: Any,
) -> None:
    """Answer prompts with the base, adapter or merged model. One as text, while it is made; several as JSON lines."""
    opened = finetune.RunDirectory.open(run)
    with _importing(f"generate with {run}"):
        from finetune.inference import commands
    settings = Settings(**answers, batch_size=batch)
    commands.generate(
        opened, prompts or [], file, model, settings, as_json=as_json, system=system, trust_remote_code=trust_code
    )


@functools.partial(command, shared=options_of(Settings))
def chat(
    run: Run,
    model: Model = "adapter",
    system: System = None,
    max_new_tokens: MaxNewTokens = 512,
    trust_code: TrustCode = False,
    **answers: Any,
) -> None:
    """Converse with a run's model. /base, /adapter and /both say which answers, /help lists the commands."""
    opened = finetune.RunDirectory.open(run)
    with _importing(f"chat with {run}"):
        from finetune.inference import commands
    commands.chat(opened, model, Settings(max_new_tokens, **answers), system=system, trust_remote_code=trust_code)


@functools.partial(command, name="eval")
def evaluate(
    run: Run,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="METRIC",
            help="Score answers to the evaluation set; may be repeated. "
            + "; ".join(f"{name + ':' * bool(m.takes) + m.takes}: {m.help}" for name, m in METRICS.items())
            + "; SCHEMA.json: it is JSON of this schema; FILE.py:FUNCTION: your own, of (answer, reference, row).",
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task", metavar="TASK",
            help="A task of lm-evaluation-harness, by name or YAML file, which may run code; may be repeated.",
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME",
            help="base, adapter or merged; may be repeated. All that there are by default.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Answer only so many questions, and rows of each task.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Of answers and tasks.")] = 16,
    chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Render the prompts of tasks with the chat template.")
    ] = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare base, adapter and merged model. Loss, perplexity, scored answers and tasks, with confidence intervals."""
    opened = finetune.RunDirectory.open(run)
    with _importing(f"eval of {run}"):
        score = finetune.evaluate
    scores = score(
        opened, metrics=metrics or (), tasks=tasks or (), models=models or (), limit=limit,
        max_new_tokens=max_new_tokens, batch_size=batch_size, apply_chat_template=chat_template,
        trust_remote_code=trust_code, terminal=_terminal(quiet=as_json),
    )  # fmt: skip
    if as_json:
        _print_json(scores.as_dict())


@command
def launch(
    config: ConfigFile,
    on: Annotated[str, typer.Option(help=_listed(TARGETS))] = "",
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus: Annotated[int, typer.Option("--gpus-per-node", min=1)] = 8,
    gpu: Annotated[str | None, typer.Option(help="The card's name for SkyPilot, such as H100.")] = None,
    image: Annotated[str | None, typer.Option(help="A container image that has finetune.")] = None,
    volume: Annotated[str, typer.Option(help="A volume that all nodes can write.")] = "finetune",
    output: Annotated[Path | None, _file("--output", "Where to write the file.")] = None,
) -> None:
    """Write the file that starts a job on a cluster. Its standard tool then starts the nodes, and restarts them."""
    from finetune.launch import render

    _chosen("--on", on, TARGETS)
    file, submit = render.write(
        config, overrides or [], on, nodes=nodes, gpus=gpus, gpu=gpu, image=image, volume=volume, output=output
    )
    typer.echo(visible(f"{file} starts the job: {submit}", LINES))


@command
def report(run: Run) -> None:
    """Redraw the plot and report.html of a run."""
    opened = finetune.RunDirectory.open(run)
    stage(f"report of {run}: importing the libraries")
    from finetune.report.page import write

    typer.echo(visible(str(write(opened, plot=True))))
    if not opened.finished:
        typer.echo(f"{run} is not finished: the report has what there is so far", err=True)


@command
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.")],
    page: Page = None,
    as_json: Json = False,
) -> None:
    """Put runs side by side. What differs in their configs, and what came out."""
    stage("compare: importing the libraries")
    _give_page(finetune.compare(runs), as_json, page)


@command
def doctor(
    run: Annotated[
        Path | None, typer.Argument(help="A run directory to check instead of the machine; the config of --certify.")
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Try everything on the device anew; writes certificate.html and .json.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine, or a run directory. Says what is wrong and what to do, and connects to nothing."""
    stage(f"doctor of {'this machine' if certify or not run else run}: importing the libraries")
    if certify:
        from finetune.doctor.certify import certify as certified
        from finetune.settings import load_config

        _give(certified(load_config(run, []) if run else None, _terminal(quiet=as_json)), as_json)
        return
    from finetune.doctor import machine
    from finetune.doctor import run_check as run_directory

    examination = run_directory.examine(run) if run else machine.examine()
    _give(examination, as_json)
    sys.exit(examination.exit_code)


@command
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference as Markdown instead.")] = False,
) -> None:
    """Print the JSON schema of a config file."""
    from finetune import settings

    typer.echo(settings.reference().rstrip("\n") if markdown else json.dumps(settings.schema(), indent=2))


# -- what they share -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _importing(doing: str, then: str = "") -> Iterator[None]:
    """Say on a terminal that libraries are imported, which takes seconds, and speed up the imports in the block."""
    stage(f"{doing}: importing the libraries{then}")
    with libraries.importing():
        yield


def _terminal(*, quiet: bool = False) -> Terminal:
    from finetune.report.terminal import Terminal

    return Terminal(quiet=quiet)


def _give(view: View, as_json: bool) -> None:
    """Print a view, on the terminal or as JSON."""
    if as_json:
        _print_json(view.as_dict())
    else:
        _terminal().show(view)


def _give_page(view: PageView, as_json: bool, page: Path | None) -> None:
    """Write the page of a view, if one is asked for, and print the view."""
    if page:
        view.write(page)
        _wrote(page, as_json)
    _give(view, as_json)


def _chosen(option: str, name: str, entries: Any) -> None:
    """Raise ConfigError where the option that names an entry of a table is missing; the message lists the entries."""
    if not name:
        raise ConfigError(f"choose with {option}: {_listed(entries)}")


def _wrote(path: Path, as_json: bool) -> None:
    """Say that a file was written, on stderr if the output is JSON."""
    typer.echo(visible(f"wrote {path}"), err=as_json)


def _announce(title: str, job: Config) -> None:
    """Print the job to be forecast, before its libraries take seconds to import."""
    from rich.console import Console

    from finetune.report import printing, words

    printing.say(Console(), f"{title}: {words.base(job)}; adapter: {words.adapter(job.adapter)}")


def _note_missing(job: Config) -> None:
    """Note the rows that were missing from a forecast; their file may be on the machine that will train."""
    from finetune.data import sources

    for why in sources.missing(job.data.train):
        _terminal().note(f"{why}; without it every row counts as `data.max_length` long")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


@contextlib.contextmanager
def errors_reported(debug: bool = False) -> Iterator[None]:
    """Turn an error in the block into one paragraph and its exit code; with `debug` raise it."""
    try:
        yield
    except FinetuneError as error:
        if debug:
            raise
        if error.shared and not _speaks():
            sys.exit(error.exit_code)
        _fail(str(error), error.exit_code)
    except (MemoryError, RuntimeError) as error:
        from finetune.measure.out_of_memory import is_out_of_memory, reason

        if debug or not is_out_of_memory(error):
            raise
        _fail(
            f"out of memory: {reason(error)}; use a machine with more, or free some of this one",
            OutOfMemoryError.exit_code,
        )
    except BrokenPipeError:  # the reader has closed the output; click ends quietly
        raise
    except OSError as error:
        if debug:
            raise
        _fail(f"{error.filename or 'the output'}: {error.strerror or error}", MachineError.exit_code)
    except Terminated as ended:
        _fail(str(ended), Terminated.exit_code)
    except KeyboardInterrupt as stopped:
        what = f": {stopped}" if str(stopped) else "; start the same command again"
        _fail(f"interrupted{what}", INTERRUPTED)


def _refusing() -> contextlib.AbstractContextManager[None]:
    """See `ranks.refusing`; a process without others need not import torch for it."""
    if "WORLD_SIZE" not in os.environ:
        return contextlib.nullcontext()
    from finetune.runtime import ranks

    return ranks.refusing()


def _speaks() -> bool:
    from finetune.runtime import ranks

    return ranks.is_local_main()


def _fail(message: str, code: int) -> NoReturn:
    for stream, text in ((sys.stderr, f"error: {message}\n"), (sys.stdout, "")):
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            from finetune.report.printing import discard

            discard(stream)
    sys.exit(code)


def main() -> None:
    """The console script `finetune`."""
    sys.stderr = VisibleStream(sys.stderr)
    name, *arguments = sys.argv[1:] or [""]
    dashed = [argument for argument in arguments if re.match(r"--[a-z]+\.[a-z_]+|-[a-z]+\.[a-z_]+=", argument)]
    if dashed and name in _CHANGEABLE:  # as other tools take them
        _fail(f"`{dashed[0]}`: write an override without dashes, as section.key=value", ConfigError.exit_code)
    try:
        app()
    finally:
        # Python would search all of the libraries' objects for garbage once more: a second of a forecast's few.
        gc.freeze()
