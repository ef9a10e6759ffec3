"""The built-in rows as one more kind of source: questions about Python's standard library."""

from __future__ import annotations

from finetune import tables


def register() -> None:
    """Add `builtin:python_docs` and `builtin:python_pairs` to the sources."""
    tables.extend("finetune.data.sources", _add_kind)


def _add_kind() -> None:
    from finetune.data.sources import KINDS
    from finetune.extras.python_docs.rows import BuiltIn

    KINDS.insert(0, BuiltIn())
