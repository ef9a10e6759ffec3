"""The command line: commands and exit codes, no logic.

The names of `finetune` import their modules lazily, since their libraries take seconds to import. Each command loads
its config or opens its run first, so that errors there are reported at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import finetune
from finetune.errors import ConfigError, FinetuneError, MachineError, OutOfMemoryError, Terminated
from finetune.export.formats import FORMATS, find
from finetune.export.gguf_types import TYPES, check
from finetune.inference.metrics import METRICS
from finetune.launch.targets import TARGETS
from finetune.model.caches import CACHES
from finetune.report.visible import LINES, VisibleStream, visible
from finetune.runtime import libraries, restart
from finetune.runtime.stages import stage

if TYPE_CHECKING:
    from finetune.config import Config
    from finetune.report.terminal import Terminal

INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Fine-tune a language model on the GPU you have: LoRA, QLoRA, measured memory, proven exports.",
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"finetune {importlib.metadata.version('finetune')}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


ConfigFile = Annotated[Path, typer.Argument(help="A config, such as configs/tiny_cpu.yaml.", show_default=False)]


def path(text: str) -> Path:
    """A file to write; a shell leaves the `~` of `--html=~/data.html` to the program."""
    return Path(os.path.expanduser(text))


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, such as training.max_steps=20.", show_default=False),
]
Run = Annotated[Path, typer.Argument(help="A run directory, such as runs/tiny_cpu.", show_default=False)]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the Python code that the run's base ships with, at its revision."),
]
FormatName = Annotated[
    str, typer.Option("--to", help="; ".join(f"{name}: {entry.help}" for name, entry in FORMATS.items()))
]
TargetName = Annotated[
    str,
    typer.Option("--on", help="; ".join(f"{name}: {t.help}" for name, t in TARGETS.items()), show_default=False),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run aside and start over.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train as the config says, or resume an interrupted run."""

    def work() -> None:
        with _refusing():
            job = finetune.load_config(config, overrides or [])
        stage(f"train {config}: importing the libraries")
        with libraries.importing():
            from finetune.runtime import ranks

            start = finetune.train  # which imports its module
        with restart.permitted():
            result = start(job, fresh=fresh, terminal=_terminal(quiet=as_json))
        if as_json and ranks.is_main():
            _print_json(result.summary())

    _run(work, debug)


@app.command()
def data(
    config: ConfigFile,
    overrides: Overrides = None,
    page: Annotated[Path | None, typer.Option("--html", parser=path, help="Also write it as an HTML page.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the data as the model sees it. What is trained, and what is padding; no GPU or weights needed."""

    def work() -> None:
        job = finetune.load_config(config, overrides or [])
        stage(f"data of {config}: importing the libraries, then tokenizing the rows")
        with libraries.importing():
            inspect = finetune.inspect_data
        found = inspect(job)
        if page:
            found.write(page)
        if as_json:
            _print_json(found.as_dict())
        else:
            _terminal().inspected(found.inspection)

    _run(work, debug)


Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="A card such as 'RTX 4090', a size such as 24GiB, auto or cpu.", show_default=False),
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, max=1024, help="How many of them; the figures are those of one.")]


CacheName = Annotated[
    str, typer.Option("--cache", help="; ".join(f"{name}: {entry.help}" for name, entry in CACHES.items()))
]


@app.command()
def init(
    model: Annotated[
        str | None, typer.Argument(help="The base: a directory, a hub name or builtin:tiny-llama.", show_default=False)
    ] = None,
    rows: Annotated[
        str | None,
        typer.Argument(metavar="[DATA]", help="A file, a folder or a data set of the hub.", show_default=False),
    ] = None,
    gpu: Gpu = None,
    other: Annotated[
        Path | None,
        typer.Option("--from", parser=path, help="Translate this config of Axolotl or LLaMA-Factory instead."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", parser=path, help="Where to write the config.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing, and replace a file that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Write a first config. It fits the model and the data to the card; what is missing is asked for."""

    def work() -> None:
        from finetune.init import job

        job.create(model, rows, gpu, other, output, yes=yes, say=lambda text: typer.echo(visible(text, LINES)))

    _run(work, debug)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Gpu = None,
    gpus: Gpus = 1,
    picture: Annotated[
        Path | None, typer.Option("--picture", parser=path, help="Draw memory over the step as a PNG.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", parser=path, help="Also write it as an HTML page.")] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Forecast answers instead: weights, KV cache, working memory.")
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="With --inference: prompts at a time.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=2,
            show_default=False,
            help="With --inference: tokens of a prompt and its answer; by default data.max_length.",
        ),
    ] = None,
    cache: CacheName = "dynamic",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Forecast the memory of a training step, or of answers. By phase and purpose; no GPU or weights needed."""

    def work() -> None:
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
            with libraries.importing():
                from finetune.forecast import serving
            served = serving.forecast(job, gpu, rows=batch, context=context, cache=cache)
            _print_json(served.as_dict()) if as_json else _terminal().served(served)
            sys.exit(0 if served.fits else OutOfMemoryError.exit_code)
        with libraries.importing():
            make = finetune.plan  # which imports its module
        found = make(job, gpu, gpus)
        if picture:
            found.draw(picture)
        if page:
            found.write(page)
        if as_json:
            _print_json(found.as_dict())
        else:
            if found.fitted:
                _terminal().chose(found.fitted)
            _terminal().planned(found.forecast, found.levers)
        if not found.forecast.fits:
            sys.exit(OutOfMemoryError.exit_code)

    _run(work, debug)


@app.command()
def fit(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Gpu = None,
    gpus: Gpus = 1,
    output: Annotated[
        Path | None, typer.Option("--output", parser=path, help="Where to write the fitted config.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the fastest setting that fits. At the same global batch; written as a config."""

    def work() -> None:
        job = finetune.load_config(config, overrides or [])
        if not as_json:
            _announce(f"fit of {config}", job)
        with libraries.importing():
            from finetune.forecast import planning
        fitted, limits = planning.fit_with_limits(job, gpu, gpus)
        target = output or Path(f"{config.stem}_fitted.yaml")
        planning.write(fitted, target)
        if as_json:
            _print_json({**fitted.as_dict(), "limits": limits.as_dict(), "config": str(target)})
        else:
            _terminal().fitted(fitted, limits, target)

    _run(work, debug)


@app.command()
def merge(
    run: Run,
    onto: Annotated[
        str | None,
        typer.Option(
            "--onto",
            help="16-bit: the base as published, the default; quantized: as it was quantized for training.",
            show_default=False,
        ),
    ] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Merge the adapter, and prove the result. It must equal the base with the adapter; the same command resumes it."""

    def work() -> None:
        opened = finetune.RunDirectory.open(run)
        stage(f"merge {run}: importing the libraries")
        with libraries.importing():
            prove = finetune.merge
        proof = prove(opened, onto=onto, trust_remote_code=trust_code, terminal=_terminal(quiet=as_json))
        if as_json:
            _print_json(proof)

    _run(work, debug)


@app.command()
def export(
    run: Run,
    format: FormatName,
    trust_code: TrustCode = False,
    as_json: Json = False,
    debug: Debug = False,
    type: Annotated[
        str, typer.Option("--type", help="; ".join(f"{name}: {entry.help}" for name, entry in TYPES.items()))
    ] = "f16",
    push: Annotated[
        str | None,
        typer.Option("--push", help="Upload it to this repository of the hub, private if new.", show_default=False),
    ] = None,
) -> None:
    """Export for the programs that serve a model, and prove it. What was written must equal what was trained."""

    def work() -> None:
        find(format)
        check(type)
        opened = finetune.RunDirectory.open(run)
        stage(f"export {run}: importing the libraries")
        with libraries.importing():
            from finetune.lifecycle import publish
        record = publish.export_model(
            opened, format, type=type, push=push, trust_remote_code=trust_code, terminal=_terminal(quiet=as_json)
        )
        if as_json:
            _print_json(record)

    _run(work, debug)


def which(model: str) -> str:
    """A model of a run; parses the option of that name."""
    if model not in ("base", "adapter", "merged"):
        raise typer.BadParameter(f"{model!r}: choose base, adapter or merged")
    return model


Model = Annotated[str, typer.Option("--model", parser=which, metavar="NAME", help="base, adapter or merged.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0, max=1)]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="0 is off.")]
MinP = Annotated[float, typer.Option("--min-p", min=0, max=1)]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", help="1 is none.")]
Seed = Annotated[int, typer.Option("--seed", help="Of sampled answers.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends an answer; may be repeated.")]


@app.command()
def generate(
    run: Run,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", parser=path, help="Prompts: text lines, or rows with `prompt` or `messages`."),
    ] = None,
    model: Model = "adapter",
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="How many prompts at a time.")] = 16,
    cache: CacheName = "dynamic",
    trust_code: TrustCode = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answer prompts with the base, adapter or merged model. One as text, while it is made; several as JSON lines."""

    def work() -> None:
        opened = finetune.RunDirectory.open(run)
        stage(f"generate with {run}: importing the libraries")
        with libraries.importing():
            from finetune.inference import commands
            from finetune.inference.generation import Settings
        settings = Settings(
            max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, (*(stop or ()),), batch, cache
        )
        commands.generate(opened, prompts or [], file, model, settings, as_json=as_json, trust_remote_code=trust_code)

    _run(work, debug)


@app.command()
def chat(
    run: Run,
    model: Model = "adapter",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    cache: CacheName = "dynamic",
    trust_code: TrustCode = False,
    debug: Debug = False,
) -> None:
    """Converse with a run's model. /base and /adapter switch the adapter off and on, /help lists the commands."""

    def work() -> None:
        opened = finetune.RunDirectory.open(run)
        stage(f"chat with {run}: importing the libraries")
        with libraries.importing():
            from finetune.inference import commands
            from finetune.inference.generation import Settings
        settings = Settings(
            max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, (*(stop or ()),), cache=cache
        )
        commands.chat(opened, model, settings, trust_remote_code=trust_code)

    _run(work, debug)


@app.command("eval")
def evaluate(
    run: Run,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", show_default=False, metavar="METRIC",
            help="Score answers to the evaluation set; may be repeated. "
            + "; ".join(f"{name + ':' * bool(m.takes) + m.takes}: {m.help}" for name, m in METRICS.items())
            + "; SCHEMA.json: it is JSON of this schema; FILE.py:FUNCTION: your own, of (answer, reference, row).",
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task", metavar="TASK", show_default=False,
            help="A task of lm-evaluation-harness, by name or YAML file; may be repeated.",
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME", show_default=False,
            help="base, adapter or merged; may be repeated. All that there are by default.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Answer only so many questions, and rows of each task.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 256,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Of answers and tasks.")] = 16,
    chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Render the prompts of tasks with the chat template.")
    ] = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Compare base, adapter and merged model. Loss, perplexity, scored answers and tasks, with confidence intervals."""

    def work() -> None:
        opened = finetune.RunDirectory.open(run)
        stage(f"eval of {run}: importing the libraries")
        with libraries.importing():
            score = finetune.evaluate
        scores = score(
            opened, metrics=metrics or (), tasks=tasks or (), models=models or (), limit=limit,
            max_new_tokens=max_new_tokens, batch_size=batch_size, apply_chat_template=chat_template,
            trust_remote_code=trust_code, terminal=_terminal(quiet=as_json),
        )  # fmt: skip
        if as_json:
            _print_json(scores.as_dict())

    _run(work, debug)


@app.command()
def launch(
    config: ConfigFile,
    on: TargetName,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1)] = 1,
    gpus: Annotated[int, typer.Option("--gpus-per-node", min=1)] = 8,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="The card's name for SkyPilot, such as H100.", show_default=False)
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="A container image that has finetune.", show_default=False)
    ] = None,
    volume: Annotated[str, typer.Option("--volume", help="A volume that all nodes can write.")] = "finetune",
    output: Annotated[Path | None, typer.Option("--output", parser=path, help="Where to write the file.")] = None,
    debug: Debug = False,
) -> None:
    """Write the file that starts a job on a cluster. Its standard tool then starts the nodes, and restarts them."""

    def work() -> None:
        from finetune.launch import files

        file, command = files.write(
            config, overrides or [], on, nodes=nodes, gpus=gpus, gpu=gpu, image=image, volume=volume, output=output
        )
        typer.echo(visible(f"{file} starts the job: {command}", LINES))

    _run(work, debug)


@app.command()
def report(run: Run, debug: Debug = False) -> None:
    """Redraw the plot and report.html of a run."""

    def work() -> None:
        opened = finetune.RunDirectory.open(run)
        stage(f"report of {run}: importing the libraries")
        from finetune.report.write import write

        typer.echo(visible(str(write(opened))))
        if not opened.finished:
            typer.echo(f"{run} is not finished: the report has what there is so far", err=True)

    _run(work, debug)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.", show_default=False)],
    page: Annotated[Path | None, typer.Option("--html", parser=path, help="Also write it as an HTML page.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Put runs side by side. What differs in their configs, and what came out."""

    def work() -> None:
        stage("compare: importing the libraries")
        found = finetune.compare(runs)
        if page:
            found.write(page)
        if as_json:
            _print_json(found.as_dict())
        else:
            _terminal().side_by_side(found)

    _run(work, debug)


@app.command()
def doctor(
    run: Annotated[
        Path | None, typer.Argument(help="A run directory to check instead of the machine.", show_default=False)
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this machine, or a run directory. Says what is wrong and what to do, and connects to nothing."""

    def work() -> None:
        stage(f"doctor of {run or 'this machine'}: importing the libraries")
        from finetune.doctor import machine
        from finetune.doctor import run as run_directory

        found = run_directory.examine(run) if run else machine.examine()
        if as_json:
            _print_json(found.as_dict())
        else:
            _terminal().examined(found.findings)
        sys.exit(found.exit_code)

    _run(work, debug)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference as Markdown instead.")] = False,
    debug: Debug = False,
) -> None:
    """Print the JSON schema of a config file."""

    def work() -> None:
        from finetune import settings

        typer.echo(settings.reference().rstrip("\n") if markdown else json.dumps(settings.schema(), indent=2))

    _run(work, debug)


def _terminal(*, quiet: bool = False) -> Terminal:
    from finetune.report.terminal import Terminal

    return Terminal(quiet=quiet)


def _announce(title: str, job: Config) -> None:
    """Print what is about to be forecast, as importing the libraries for it takes seconds."""
    from rich.console import Console

    from finetune.report import printing, words

    printing.say(Console(), f"{title}: {words.base(job)}; adapter: {words.adapter(job)}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _run(work: Callable[[], None], debug: bool) -> None:
    """Run a command's work and turn an error into one paragraph and its exit code."""
    try:
        work()
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
    except BrokenPipeError:  # who reads the output has seen enough; click ends quietly
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
    try:
        app()
    finally:
        # Python would search all of the libraries' objects for garbage once more: a second of a forecast's few.
        gc.freeze()
