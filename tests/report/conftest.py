"""The run that reports are tested with."""

from written_run import empty_run, run

__all__ = ["empty_run", "run"]
