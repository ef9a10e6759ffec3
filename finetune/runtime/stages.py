"""Says on a terminal what a slow stage is doing, so that nobody looks at a still screen; a log has results alone."""

from __future__ import annotations

import os
import sys


def stage(text: str) -> None:
    """Print the line `text ...`, once for all ranks, if standard error is a terminal."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{text} ...\n")
        sys.stderr.flush()
