"""The command line: commands and exit codes, no logic.

The names of `finetune` import their modules lazily, since their libraries take seconds to import. Each command loads
its config or opens its run first, so that errors there are reported at once.
"""

from __future__ import annotations

import gc
import re
import sys

from finetune.cli import job_commands, model_commands, run_commands  # noqa: F401  (in the order of `--help`)
from finetune.cli.program import CHANGEABLE, app, errors_reported, fail
from finetune.errors import ConfigError
from finetune.report.visible import VisibleStream
from finetune.storage import private

__all__ = ["app", "errors_reported", "main"]


def main() -> None:
    """The console script `finetune`."""
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
