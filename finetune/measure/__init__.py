"""The memory that a run takes."""
