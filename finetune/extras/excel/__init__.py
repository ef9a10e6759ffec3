"""Excel workbooks (.xlsx) as one more kind of file with rows."""

from __future__ import annotations

from finetune import tables


def register() -> None:
    """Add `.xlsx` to the files that are read."""
    tables.extend("finetune.data.readers", _add_reader)


def _add_reader() -> None:
    from finetune.data.readers import HEADED, READERS
    from finetune.extras.excel import xlsx

    READERS[".xlsx"] = xlsx.read
    HEADED.append(xlsx.read)
