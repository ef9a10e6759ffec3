"""Content in each compression, made by the library that most people use for it."""

from __future__ import annotations

import gzip
import struct


def packed(content: bytes, ending: str) -> bytes:
    """`content` as one stream of the compression with this ending; as it is for any other."""
    packers = {".gz": gzip.compress, ".zst": _zstandard}
    return packers.get(ending, bytes)(content)


def _zstandard(content: bytes) -> bytes:
    """With a checksum, as `zstd` writes one and pyarrow does not (RFC 8878, 3.1.1)."""
    import pyarrow
    import xxhash

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    frame = bytearray(sink.getvalue().to_pybytes())
    frame[4] |= 0b100
    return bytes(frame) + struct.pack("<I", xxhash.xxh64(content).intdigest() & 0xFFFFFFFF)
