"""The program: its commands with `--debug` each, and how an error ends one."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NoReturn

import typer

from finetune.errors import INTERRUPTED, ConfigError, FinetuneError, MachineError, OutOfMemoryError, Terminated

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


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_NO_CONFIG = (
    "a config is needed: `finetune init MODEL DATA` writes one, such as `finetune init builtin:tiny-llama facts.csv`; "
    "to try the program, `finetune train builtin:tiny_cpu` trains a built-in job on a CPU"
)
CHANGEABLE: set[str] = set()
"""The commands that take `section.key=value`."""


def command(
    work: Callable[..., None],
    name: str = "",
    shared: Mapping[str, inspect.Parameter] | None = None,
    after: str = "",
) -> Callable[..., None]:
    """Make `work` a command, by default with its own name; all commands have `--debug`.

    `shared` are options that replace the `**` of `work`, except those that `work` declares itself. `after` is the
    command that it follows in `finetune --help`, where that is not the last one.
    """
    name = name or work.__name__

    @functools.wraps(work)
    def run(*, debug: bool, **given: Any) -> None:
        with errors_reported(debug):
            if given.get("config", "") is None:
                raise ConfigError(_NO_CONFIG)
            work(**given)

    own = dict(inspect.signature(work, eval_str=True).parameters)
    if "config" in own:  # so that `run` says how to begin
        own["config"] = own["config"].replace(default=None)
    if shared:
        own.popitem()  # the `**` parameter
        own = {**own, **shared, **own}
    if "overrides" in own:
        CHANGEABLE.add(name)
    own["debug"] = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own.values()]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    app.command(name)(run)
    if after:
        commands = app.registered_commands
        commands.insert([one.name for one in commands].index(after) + 1, commands.pop())
    return run


@contextlib.contextmanager
def errors_reported(debug: bool = False) -> Iterator[None]:
    """Turn an error in the block into one paragraph and its exit code; with `debug` raise it."""
    try:
        yield
    except FinetuneError as error:
        if debug:
            raise
        if error.shared:  # all ranks raise it, and the first one on each machine prints it
            from finetune.runtime import ranks

            if not ranks.is_local_main():
                sys.exit(error.exit_code)
        fail(str(error), error.exit_code)
    except (MemoryError, RuntimeError) as error:
        from finetune.runtime.out_of_memory import is_out_of_memory, reason

        if debug or not is_out_of_memory(error):
            raise
        fail(
            f"out of memory: {reason(error)}; use a machine with more, or free some of this one",
            OutOfMemoryError.exit_code,
        )
    except BrokenPipeError:  # the reader has closed the output; click ends quietly
        raise
    except OSError as error:
        if debug:
            raise
        fail(f"{error.filename or 'the output'}: {error.strerror or error}", MachineError.exit_code)
    except Terminated as ended:
        fail(str(ended), Terminated.exit_code)
    except KeyboardInterrupt as stopped:
        what = f": {stopped}" if str(stopped) else "; start the same command again"
        fail(f"interrupted{what}", INTERRUPTED)


def refusing() -> contextlib.AbstractContextManager[None]:
    """See `ranks.refusing`; a process without others need not import torch for it."""
    if "WORLD_SIZE" not in os.environ:
        return contextlib.nullcontext()
    from finetune.runtime import ranks

    return ranks.refusing()


def fail(message: str, code: int) -> NoReturn:
    """Print an error, or how the run was interrupted, also where the output is closed, and exit."""
    kind = "" if code in (INTERRUPTED, Terminated.exit_code) else "error: "
    for stream, text in ((sys.stderr, f"{kind}{message}\n"), (sys.stdout, "")):
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            from finetune.report.printing import discard

            discard(stream)
    sys.exit(code)
