"""The command line: commands and exit codes, no logic.

The names of `finetune` import their modules lazily, since their libraries take seconds to import. Each command loads
its config or opens its run first, so that errors there are reported at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import sys
from typing import Any

from finetune import tables
from finetune.cli import job_commands, model_commands, run_commands  # noqa: F401  (in the order of `--help`)
from finetune.cli.program import CHANGEABLE, app, errors_reported, fail
from finetune.errors import ConfigError
from finetune.report.visible import VisibleStream
from finetune.storage import private

__all__ = ["app", "errors_reported", "main"]


def main() -> None:
    """The console script `finetune`."""
    _open_closed_streams()
    atexit.register(_silence_the_end)  # the first one registered is the last to run
    sys.stderr = VisibleStream(sys.stderr)
    with errors_reported():
        if note := private.settle_home():
            sys.stderr.write(f"{note}\n")
    name, *arguments = sys.argv[1:] or [""]
    dashed = [argument for argument in arguments if re.match(r"--[a-z]+\.[a-z_]+|-[a-z]+\.[a-z_]+=", argument)]
    if dashed and name in CHANGEABLE:  # the form that other tools take
        fail(f"`{dashed[0]}`: write an override without dashes, as section.key=value", ConfigError.exit_code)
    try:
        app()
    finally:
        # Python would search all of the libraries' objects for garbage once more: a second of a forecast's few.
        gc.freeze()


def _silence_the_end() -> None:
    """Discard what libraries write while the interpreter is taken down: triton 3.9 lists all of its types as leaked,
    because `gc.freeze` keeps them.
    """
    if "triton" not in sys.modules:
        return
    with contextlib.suppress(OSError, ValueError):  # a closed pipe, a closed stream
        sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _open_closed_streams() -> None:
    """Give a standard stream that was closed (`2>&-`) to /dev/null: the next file to be opened would take its number,
    and what libraries print to it would be written into that file.
    """

    def opened(number: int, mode: str) -> Any:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        return os.fdopen(number, mode, closefd=False)

    sys.stdin = sys.stdin or opened(0, "r")
    sys.stdout = sys.stdout or opened(1, "w")
    sys.stderr = sys.stderr or opened(2, "w")


tables.complete(__name__)
