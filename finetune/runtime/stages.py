"""Announces slow stages on a terminal; a log, which is no terminal, gets results only."""

from __future__ import annotations

import os
import sys


def stage(text: str) -> None:
    """Print the line `text ...`, once for all ranks, if standard error is a terminal."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{text} ...\n")
        sys.stderr.flush()
