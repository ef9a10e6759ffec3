"""Tokenized rows as an Arrow file: written as they come, and mapped into memory to be read."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np

from finetune.data.cache import writing
from finetune.data.chat import Encoded
from finetune.data.sources import Row


def mapped(path: Path) -> Any:
    """The `datasets.Dataset` of a file that a RowsWriter wrote. Its rows take no memory until they are read."""
    import datasets

    return datasets.Dataset.from_file(str(path))


class RowsWriter:
    """Writes tokenized rows to an Arrow file (`with RowsWriter(path) as writer:`), one record batch a call.

    Raises MachineError where the disk does not take it.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow

        ids = pyarrow.list_(pyarrow.int32())
        count, text = pyarrow.int64(), pyarrow.string()
        names = {"input_ids": ids, "labels": ids, "length": count, "trained": count, "place": text, "source": text}
        self._schema = pyarrow.schema(list(names.items()))
        with writing():
            self._file = open(path, "wb")  # noqa: SIM115
            self._stream = pyarrow.ipc.new_stream(self._file, self._schema)

    def write(self, rows: list[tuple[Row, Encoded]]) -> None:
        """Append rows, each with where it comes from."""
        import pyarrow

        if not rows:
            return
        sizes = [len(encoded.input_ids) for _, encoded in rows]
        ends = np.cumsum([0, *sizes], dtype=np.int32)

        def column(values: Iterable[list[int]]) -> Any:
            flat = np.fromiter(itertools.chain.from_iterable(values), dtype=np.int32, count=ends[-1])
            return pyarrow.ListArray.from_arrays(ends, flat)

        columns = [
            column(encoded.input_ids for _, encoded in rows),
            column(encoded.labels for _, encoded in rows),
            sizes,
            [encoded.trained for _, encoded in rows],
            [row.place for row, _ in rows],
            [row.source for row, _ in rows],
        ]
        with writing():
            self._stream.write_batch(pyarrow.record_batch(columns, schema=self._schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            return
        with writing():
            self._stream.close()
            self._file.close()
