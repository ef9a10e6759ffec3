"""Commands on a trained run: its merged and exported models, its answers and its scores."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

import finetune
from finetune.cli import options
from finetune.cli.output import importing, new_terminal, print_json, read_or_not
from finetune.cli.program import command
from finetune.config.field_types import pick
from finetune.evaluation.metrics import METRICS
from finetune.export.export_formats import FORMATS
from finetune.export.gguf.gguf_types import TYPES, check
from finetune.generation.settings import Settings


@command
@read_or_not()
def merge(
    run: options.RunPath,
    onto: Annotated[
        str | None,
        typer.Option(help="16-bit: the base as published, the default; quantized: as it was quantized for training."),
    ] = None,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:
    """Merge the adapter, and prove the result. It must equal the base with the adapter; the same command resumes it."""
    opened = finetune.RunDirectory.open(run)
    with importing(f"merge {run}"):
        prove = finetune.merge
    proof = prove(opened, onto=onto, trust_remote_code=trust_code, terminal=new_terminal(quiet=as_json))
    if as_json:
        print_json(proof)


@command
@read_or_not()
def export(
    run: options.RunPath,
    format: Annotated[str, typer.Option("--to", help=options.listed(FORMATS))] = "",
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
    type: Annotated[
        str | None, typer.Option(help=f"{options.listed(TYPES)}. By default that of `output.serve`, or f16.")
    ] = None,
    push: Annotated[str | None, typer.Option(help="Upload it to this repository of the hub, private if new.")] = None,
    rounded: Annotated[
        bool, typer.Option("--rounded", help="Round with the training rows, so that more of the training is kept.")
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Upload it even if it keeps less than 90% of what training gained.")
    ] = False,
) -> None:
    """Export for the programs that serve a model, and prove it. What was written must equal what was trained."""
    options.chosen("--to", format, FORMATS)
    pick(FORMATS, format, "export format")
    if type is not None:
        check(type, format)
    opened = finetune.RunDirectory.open(run)
    with importing(f"export {run}"):
        write = finetune.export_model
    terminal = new_terminal(quiet=as_json)
    record = write(
        opened, format, type=type, push=push, anyway=anyway, rounded=rounded, trust_remote_code=trust_code,
        terminal=terminal,
    )  # fmt: skip
    if as_json:
        print_json(record)


@functools.partial(command, shared=options.made_of(Settings))
def generate(
    run: options.RunPath,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.")] = None,
    file: Annotated[
        Path | None, options.file("--file", "Prompts: text lines, or rows with `prompt` or `messages`.")
    ] = None,
    shown: Annotated[
        list[Path] | None, typer.Option("--image", help="An image that the prompts show; may be repeated.")
    ] = None,
    model: options.Model = "adapter",
    system: options.System = None,
    batch: Annotated[int, typer.Option(min=1, help="How many prompts at a time.")] = 16,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
    **answers: Any,
) -> None:
    """Answer prompts with the base, adapter or merged model. One as text, while it is made; several as JSON lines."""
    opened = finetune.RunDirectory.open(run)
    with importing(f"generate with {run}"):
        from finetune.evaluation import commands
    settings = Settings(**answers, batch_size=batch)
    commands.generate(
        opened, prompts or [], file, model, settings, as_json=as_json, system=system, shown=[*map(str, shown or ())],
        trust_remote_code=trust_code,
    )  # fmt: skip


@functools.partial(command, shared=options.made_of(Settings))
def chat(
    run: options.RunPath,
    model: options.Model = "adapter",
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 512,
    trust_code: options.TrustCode = False,
    **answers: Any,
) -> None:
    """Converse with a run's model. /base, /adapter and /both say which answers, /help lists the commands."""
    opened = finetune.RunDirectory.open(run)
    with importing(f"chat with {run}"):
        from finetune.evaluation import commands
    commands.chat(opened, model, Settings(max_new_tokens, **answers), system=system, trust_remote_code=trust_code)


@functools.partial(command, name="eval")
@read_or_not()
def evaluate(
    run: options.RunPath,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Rows to measure on, in place of the evaluation set. A reward model also scores single answers.",
        ),
    ] = None,
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
            help="base, adapter, merged, or served: the newest GGUF or quantized export; may be repeated. By default "
            "all that there are of the first three.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Answer only so many questions, and rows of each task.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Of answers and tasks.")] = 16,
    chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Render the prompts of tasks with the chat template.")
    ] = False,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Compare base, adapter and merged model. Loss, perplexity, scored answers and tasks, with confidence intervals."""
    opened = finetune.RunDirectory.open(run)
    with importing(f"eval of {run}"):
        score = finetune.evaluate
    scores = score(
        opened, data=data, metrics=metrics or (), tasks=tasks or (), models=models or (), limit=limit,
        max_new_tokens=max_new_tokens, batch_size=batch_size, apply_chat_template=chat_template,
        trust_remote_code=trust_code, terminal=new_terminal(quiet=as_json),
    )  # fmt: skip
    if as_json:
        print_json(scores.as_dict())
