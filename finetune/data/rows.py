"""Tokenized rows as an Arrow file: written in a stream, read through a memory map."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.cache import writing
from finetune.data.encoded import IMAGES, ONE_SEQUENCE, SEEN, TEACHER, Encoded, RowLayout
from finetune.data.sources import Row


def mapped(path: Path) -> Any:
    """The memory-mapped `datasets.Dataset` of a file that `writer` wrote."""
    import datasets

    return datasets.Dataset.from_file(str(path))


def _schema(layout: RowLayout, images: bool) -> Any:
    """The columns of rows of a layout."""
    import pyarrow

    ids, count, text = pyarrow.list_(pyarrow.int32()), pyarrow.int64(), pyarrow.string()
    columns = {"input_ids": ids, "labels": ids, "length": count, "trained": count, "place": text, "source": text}
    if layout.segments:
        columns |= {"segments": ids, "shared": count}
    columns |= {name: pyarrow.float64() for name in layout.values}
    if layout.teacher:
        columns |= dict(zip(TEACHER, (ids, pyarrow.list_(pyarrow.float32())), strict=True))
    if images:
        size = {"height": pyarrow.int32(), "width": pyarrow.int32()}
        columns[IMAGES] = pyarrow.list_(
            pyarrow.struct({"path": text, "data": pyarrow.binary(), "digest": text, **size})
        )
        columns[SEEN] = ids
    return pyarrow.schema(list(columns.items()))


def _seen(row: Encoded) -> list[int]:
    return [number for image in row.images for number in (image.height, image.width, image.tokens)]


@contextlib.contextmanager
def writer(path: Path, *, images: bool = False) -> Iterator[Callable[[list[tuple[Row, Encoded]]], None]]:
    """A function that appends tokenized rows, all of one layout, to an Arrow file, a record batch per call.

    `images`: whether rows have the columns of their images, which are empty for those without.
    """
    import pyarrow

    schema: Any = None
    stream: Any = None

    def begin(layout: RowLayout) -> None:
        nonlocal schema, stream
        schema = _schema(layout, images)
        stream = pyarrow.ipc.new_stream(file, schema)

    def write(rows: list[tuple[Row, Encoded]]) -> None:
        if not rows:
            return
        sizes = [sum(encoded.lengths) for _, encoded in rows]
        ends = np.cumsum([0, *sizes], dtype=np.int32)

        def column(values: Iterable[list[int]]) -> Any:
            flat = np.fromiter(itertools.chain.from_iterable(values), dtype=np.int32, count=ends[-1])
            return pyarrow.ListArray.from_arrays(ends, flat)

        def of_teacher(number: int) -> Any:
            """The ids or the log-probabilities: `layout.teacher` of each token, one after the other."""
            teachers = [encoded.segments[0].teacher for _, encoded in rows]
            flat = np.concatenate([each[number].ravel() for each in teachers if each is not None])
            return pyarrow.ListArray.from_arrays(ends * layout.teacher, flat)

        layout = rows[0][1].layout
        columns = [
            column(encoded.input_ids for _, encoded in rows),
            column(encoded.labels for _, encoded in rows),
            sizes,
            [encoded.trained for _, encoded in rows],
            [row.location for row, _ in rows],
            [row.source for row, _ in rows],
            *([[encoded.lengths for _, encoded in rows]] if layout.segments else []),
            *([[encoded.shared for _, encoded in rows]] if layout.segments else []),
            *([encoded.values[name] for _, encoded in rows] for name in layout.values),
            *(map(of_teacher, range(len(TEACHER))) if layout.teacher else ()),
            *([[[vars(image) for image in encoded.images] for _, encoded in rows]] if images else []),
            *([[_seen(encoded) for _, encoded in rows]] if images else []),
        ]
        with writing():
            if stream is None:
                begin(layout)
            stream.write_batch(pyarrow.record_batch(columns, schema=schema))

    with writing():
        file = open(path, "wb")  # noqa: SIM115 -- closed below, where a full disk raises
    try:
        yield write
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        raise
    with writing():
        if stream is None:
            begin(ONE_SEQUENCE)
        stream.close()
        file.close()
