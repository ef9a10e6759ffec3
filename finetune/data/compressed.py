"""Compressed files as one flow of bytes: every stream in them, and an error for anything that is none.

Python's own readers of bz2 and xz take whatever follows the first stream for trailing garbage where it does not begin
as a stream, and gzip's passes over zeros: with one damaged byte, half the rows of a file are gone without a word.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What reading a damaged file may raise."""

_READ_BYTES = 2**16


class _Stream(Protocol):
    """One stream that is being decompressed, as `bz2` and `lzma` have it."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """A member of a gzip file."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


class _Unpacked(io.RawIOBase):
    """The bytes of all streams of a file. Raises one of `ERRORS` for damage, and for anything else behind a stream."""

    def __init__(self, path: Path, begin: Callable[[], Any]) -> None:
        self._file = io.FileIO(path)
        self._begin = begin
        self._stream: _Stream = begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        while True:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data or self._file.read(_READ_BYTES)
                if not packed:
                    return 0
                self._stream = self._begin()
            elif self._stream.needs_input:
                packed = self._file.read(_READ_BYTES)
            data = self._stream.decompress(packed, len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            if not packed and self._stream.needs_input and not self._stream.eof:
                raise EOFError("the compressed data end within a stream")

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstandard(path: Path) -> io.RawIOBase:
    import pyarrow

    return cast(io.RawIOBase, pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


COMPRESSIONS: dict[str, Callable[[Path], io.RawIOBase]] = {
    ".gz": lambda path: _Unpacked(path, _Gzip),
    ".bz2": lambda path: _Unpacked(path, bz2.BZ2Decompressor),
    ".xz": lambda path: _Unpacked(path, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
    ".zst": _zstandard,
}
"""By the ending of a file. Raise OSError, and what they read as in `ERRORS`."""


def opened(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed where its ending is of `COMPRESSIONS`. Reading raises one of `ERRORS`."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression and not path.stat().st_size:
        raise EOFError("the file is empty")
    raw = compression(path) if compression else io.FileIO(path)
    # What is in the buffer is lost where compressed data turn out to be damaged: a small one names a closer line.
    return io.BufferedReader(raw, _READ_BYTES)
