"""Compressed files as one stream of bytes: all members are read, and trailing garbage is an error.

Arrow's readers do that. Python's stop at anything after the first member that does not look like another one, so one
damaged byte can silently lose half the rows of a file. Arrow does not support xz, which is therefore read here.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

ERRORS = (EOFError, OSError, lzma.LZMAError)
"""Exceptions that reading a damaged file may raise."""

_READ_BYTES = 2**16


class _Xz(io.RawIOBase):
    """The bytes of all xz streams of a file. Raises one of `ERRORS` for damage and for trailing garbage."""

    def __init__(self, path: Path) -> None:
        self._file = io.FileIO(path)
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            packed = self._stream.unused_data
            if not packed and (self._stream.eof or self._stream.needs_input):
                packed = self._file.read(_READ_BYTES)
                if not packed and not self._stream.eof:
                    raise EOFError("the compressed data is cut off within a stream")
                if not packed:
                    return 0
            if self._stream.eof:
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            data = self._stream.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _arrow(path: Path, codec: str) -> io.RawIOBase:
    import pyarrow

    return cast(io.RawIOBase, pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), codec))


COMPRESSIONS: dict[str, Callable[[Path], io.RawIOBase]] = {
    ".gz": lambda path: _arrow(path, "gzip"),
    ".bz2": lambda path: _arrow(path, "bz2"),
    ".xz": _Xz,
    ".zst": lambda path: _arrow(path, "zstd"),
}
"""By file extension. Opening raises OSError; reading raises one of `ERRORS`."""


def opened(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed if its extension is in `COMPRESSIONS`. Reading raises one of `ERRORS`."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression and not path.stat().st_size:
        raise EOFError("the file is empty")
    raw = compression(path) if compression else io.FileIO(path)
    # Damage in compressed data discards what is buffered, so a small buffer reports a closer line number.
    return io.BufferedReader(raw, _READ_BYTES)
