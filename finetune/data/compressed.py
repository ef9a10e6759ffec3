"""Compressed files as one stream of bytes, read by Arrow: all members are read, and trailing garbage is an error."""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

from finetune.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Arrow's names by file extension."""

UNREAD = {".bz2": "bzip2", ".xz": "xz"}
"""Programs that decompress what is not read here, by file extension."""

ERRORS = (EOFError, OSError)
"""Exceptions that reading a damaged file may raise."""

_READ_BYTES = 2**16


def opened(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed if its extension is in `COMPRESSIONS`. Reading raises one of `ERRORS`.

    Raises DataError for an extension of `UNREAD`.
    """
    ending = path.suffix.lower()
    if ending in UNREAD:
        raise DataError(f"{path}: files ending in {ending} are not read; decompress it with `{UNREAD[ending]} -d`")
    if ending in COMPRESSIONS:
        import pyarrow

        if not path.stat().st_size:
            raise EOFError("the file is empty")
        raw = cast(io.RawIOBase, pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), COMPRESSIONS[ending]))
    else:
        raw = io.FileIO(path)
    # Damage in compressed data discards what is buffered, so a small buffer reports a closer line number.
    return io.BufferedReader(raw, _READ_BYTES)
