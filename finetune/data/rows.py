"""Tokenized rows as an Arrow file: written in a stream, read through a memory map."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from finetune.data.cache import writing
from finetune.data.encoded import MEDIA, MEDIA_SIZES, ONE_SEQUENCE, TEACHER, Encoded, RowLayout
from finetune.data.sources import Row


class RowTable:
    """Rows of an Arrow table by number, and its columns by name.

    It has the interface of a `datasets.Dataset`, whose library takes half a second to import and is used only for data
    sets of the hub.
    """

    def __init__(self, table: Any) -> None:
        self.table = table

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        names: list[str] = self.table.column_names
        return names

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | str) -> dict[str, Any] | list[Any]:
        if isinstance(key, str):
            values: list[Any] = self.table.column(key).to_pylist()
            return values
        if not 0 <= key < len(self):
            raise IndexError(key)
        import pyarrow.types as kinds

        row: dict[str, Any] = {}
        for name, column in zip(self.column_names, self.table.columns, strict=True):
            if kinds.is_list(column.type) and kinds.is_primitive(column.type.value_type):  # its numbers at once
                row[name] = np.from_dlpack(column[key].values).tolist()  # `to_numpy` imports pandas
            else:
                row[name] = column[key].as_py()
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))

    def select_columns(self, names: Sequence[str]) -> RowTable:
        """The rows with these columns alone."""
        return RowTable(self.table.select(names))

    def add_column(self, name: str, values: np.ndarray) -> RowTable:
        """The rows with another column, held in memory."""
        return RowTable(self.table.append_column(name, _array(values)))


def mapped(path: Path) -> RowTable:
    """The memory-mapped rows of a file that `writer` wrote."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        return RowTable(stream.read_all())


def _schema(layout: RowLayout, media: bool) -> Any:
    """The columns of rows of a layout."""
    import pyarrow

    ids, count, text = pyarrow.list_(pyarrow.int32()), pyarrow.int64(), pyarrow.string()
    columns = {"input_ids": ids, "labels": ids, "length": count, "trained": count, "place": text, "source": text}
    if layout.segments:
        columns |= {"segments": ids, "shared": count}
    columns |= {name: pyarrow.float64() for name in layout.values}
    if layout.teacher:
        columns |= dict(zip(TEACHER, (ids, pyarrow.list_(pyarrow.float32())), strict=True))
    if media:
        size = {"height": pyarrow.int32(), "width": pyarrow.int32()}
        columns[MEDIA] = pyarrow.list_(pyarrow.struct({"path": text, "data": pyarrow.binary(), "digest": text, **size}))
        columns[MEDIA_SIZES] = ids
    return pyarrow.schema(list(columns.items()))


def _columns(rows: list[tuple[Row, Encoded]], layout: RowLayout, *, media: bool) -> list[Any]:
    """The columns of `_schema` of some rows."""
    sizes = [sum(encoded.lengths) for _, encoded in rows]
    ends = np.cumsum([0, *sizes], dtype=np.int32)

    def column(values: Iterable[list[int]]) -> Any:
        return _lists(ends, np.fromiter(itertools.chain.from_iterable(values), dtype=np.int32, count=ends[-1]))

    def of_teacher(number: int) -> Any:
        """The ids or the log-probabilities: `layout.teacher` of each token, one after the other."""
        teachers = [encoded.segments[0].teacher for _, encoded in rows]
        flat = np.concatenate([each[number].ravel() for each in teachers if each is not None])
        return _lists(ends * layout.teacher, flat)

    def numbers(values: Iterable[float], kind: Any = np.int64) -> Any:
        return _array(np.array([*values], dtype=kind))

    def lists(each: Sequence[Sequence[int]]) -> Any:
        flat = np.fromiter(itertools.chain.from_iterable(each), dtype=np.int32)
        return _lists(np.cumsum([0, *map(len, each)], dtype=np.int32), flat)

    seen = [
        [number for image in encoded.media for number in (image.height, image.width, image.tokens)]
        for _, encoded in rows
    ]
    return [
        column(encoded.input_ids for _, encoded in rows),
        column(encoded.labels for _, encoded in rows),
        numbers(sizes),
        numbers(encoded.trained for _, encoded in rows),
        _texts(row.location for row, _ in rows),
        _texts(row.source for row, _ in rows),
        *([lists([encoded.lengths for _, encoded in rows])] if layout.segments else []),
        *([numbers(encoded.shared for _, encoded in rows)] if layout.segments else []),
        *(numbers((encoded.values[name] for _, encoded in rows), np.float64) for name in layout.values),
        *(map(of_teacher, range(len(TEACHER))) if layout.teacher else ()),
        *([[[vars(image) for image in encoded.media] for _, encoded in rows]] if media else []),
        *([lists(seen)] if media else []),
    ]


# `pyarrow.array` imports pandas.


def _array(values: np.ndarray) -> Any:
    """Numbers (n,) as an Arrow array that shares their memory."""
    import pyarrow

    values = np.ascontiguousarray(values)
    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(values)])


def _lists(ends: np.ndarray, flat: np.ndarray) -> Any:
    """The parts of `flat` between `ends` (int32, from 0) as an Arrow array of lists."""
    import pyarrow

    return pyarrow.ListArray.from_arrays(_array(ends), _array(flat))


def _texts(values: Iterable[str]) -> Any:
    """Texts as an Arrow array."""
    import pyarrow

    each = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, each)], dtype=np.int32)
    return pyarrow.StringArray.from_buffers(len(each), pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(each)))


@contextlib.contextmanager
def writer(path: Path, *, media: bool = False) -> Iterator[Callable[[list[tuple[Row, Encoded]]], None]]:
    """A function that appends tokenized rows, all of one layout, to an Arrow file, a record batch per call.

    `media`: whether rows have the columns of what they show, which are empty for those that show nothing.
    """
    import pyarrow

    schema: Any = None
    stream: Any = None

    def begin(layout: RowLayout) -> None:
        nonlocal schema, stream
        schema = _schema(layout, media)
        stream = pyarrow.ipc.new_stream(file, schema)

    def write(rows: list[tuple[Row, Encoded]]) -> None:
        if not rows:
            return
        layout = rows[0][1].layout
        columns = _columns(rows, layout, media=media)
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
