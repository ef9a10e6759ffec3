"""Text files as lines: decompressed, decoded, in bounded memory; invalid bytes are reported by position."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from finetune.data.compressed import COMPRESSIONS, ERRORS, opened
from finetune.data.problems import Problems
from finetune.errors import DataError

# A row is held in memory; anything longer than this (16 million tokens) is not a row of text.
ROW_BYTES = 64 * 2**20
# A JSON list is held in memory as text while its items are read; some data sets are one list of 700 MB.
LIST_CHARACTERS = 2**30
_PIECE_BYTES = 2**20

# Consecutive blank lines: more of them mean an overwritten file or a decompression bomb, and would take minutes.
_BLANK_LINES = 2**20

# Signatures of files that are not UTF-8 text. UTF-32 comes first, because its byte order mark begins with UTF-16's.
_FOREIGN = {
    codecs.BOM_UTF32_LE: "is UTF-32; convert it with `iconv -f UTF-32 -t UTF-8`",
    codecs.BOM_UTF32_BE: "is UTF-32; convert it with `iconv -f UTF-32 -t UTF-8`",
    codecs.BOM_UTF16_LE: "is UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`",
    codecs.BOM_UTF16_BE: "is UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\x1f\x8b": "is compressed with gzip; let its name end in .gz",
    b"BZh": "is compressed with bzip2; decompress it: `bzip2 -dc FILE > NEW_FILE`",
    b"\xfd7zXZ\0": "is compressed with xz; decompress it: `xz -dc FILE > NEW_FILE`",
    b"\x28\xb5\x2f\xfd": "is compressed with Zstandard; let its name end in .zst",
    b"PK\x03\x04": "is a ZIP archive or a spreadsheet; unpack it, or let its name end in .xlsx",
    b"PAR1": "is a Parquet file; let its name end in .parquet",
    b"ARROW1": "is an Arrow file; let its name end in .arrow",
    b"version https://git-lfs": "is a Git LFS pointer in place of the file; fetch it with `git lfs pull`",
}


def lines(path: Path, problems: Problems, encoding: str | None = None) -> Iterator[tuple[int, str]]:
    """Numbered lines, including their line breaks, without a byte order mark at the start of the file.

    The text is UTF-8, or else of `encoding`, if one is given. Bytes that are invalid, or a byte order mark elsewhere,
    are added to `problems` and replaced. Raises DataError for a file that is not text or damaged, and for lines beyond
    the limits.
    """
    for number, whole, text in _parts(path, ROW_BYTES, problems, encoding):
        if not whole:
            limit = f"{ROW_BYTES // 2**20} MiB"
            raise DataError(f"{path}:{number}: the line is longer than {limit}, too long for one row")
        yield number, text


def whole(path: Path, problems: Problems, encoding: str | None = None) -> str:
    """The whole text of a file. Problems and errors as in `lines`; DataError over `LIST_CHARACTERS`."""
    parts, characters = [], 0
    for _, _, text in _parts(path, _PIECE_BYTES, problems, encoding):
        parts.append(text)
        characters += len(text)
        if characters > LIST_CHARACTERS:
            limit = f"{LIST_CHARACTERS / 2**30:g} GiB"
            raise DataError(f"{path}: a list over {limit} is not read; make it lines: `jq -c '.[]' FILE > FILE.jsonl`")
    return "".join(parts)


def foreign_word(path: Path, encoding: str) -> str | None:
    """The first non-ASCII word of a file in `encoding`; None if the file is UTF-8, or not in that encoding either."""
    if _is_utf8(path):
        return None
    problems = Problems()
    texts = (text for _, _, text in _parts(path, _PIECE_BYTES, problems, encoding))
    word = next((word[0] for text in texts if (word := re.search(r"\w*[^\W\x00-\x7f]\w*", text))), None)
    return None if problems.found else word


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with opened(path) as file:
            while piece := file.read(_PIECE_BYTES):
                decoder.decode(piece)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except ERRORS:
        pass  # reported where the lines are read
    return True


def _parts(path: Path, limit: int, problems: Problems, encoding: str | None) -> Iterator[tuple[int, bool, str]]:
    """Lines, long ones in parts of about `limit` bytes: (line number, whether the line is complete, text)."""
    number, before = 1, 0  # bytes of the line before this part
    encoding = encoding if encoding and not _is_utf8(path) else None
    try:
        with opened(path) as file:
            _check_start(path, file.peek(8))
            blank = 0
            while raw := file.readline(limit):
                blank = blank + 1 if raw.isspace() else 0
                if blank > _BLANK_LINES:
                    raise DataError(f"{path}:{number}: over a million blank lines; create or download it again")
                ended = raw.endswith(b"\n")
                whole = before == 0 and (ended or len(raw) < limit)
                # A part must not end within a character (UTF-8 continuation bytes are 0x80 to 0xBF).
                while not (whole or ended) and b"\x80" <= file.peek(1)[:1] < b"\xc0":
                    raw += file.read(1)
                yield number, whole, _decoded(raw, path, number, before, problems, encoding)
                number, before = (number + 1, 0) if ended else (number, before + len(raw))
    except ERRORS as error:
        what = "cannot be read"
        if path.suffix.lower() in COMPRESSIONS:
            what = f"damaged, cut off, or not a {path.suffix} file; create or download it again"
        raise DataError(f"{path}:{number}: {what} ({error})") from None


def _check_start(path: Path, start: bytes) -> None:
    for signature, what in _FOREIGN.items():
        if start.startswith(signature):
            hexadecimal = "".join(f"{byte:02X}" for byte in signature)
            raise DataError(f"{path}:1: byte 1: expected UTF-8 text, but this {what} (it begins with 0x{hexadecimal})")
    # ASCII characters in UTF-16 have a zero byte each.
    for name, zeros, characters in (("UTF-16LE", start[1:8:2], start[:8:2]), ("UTF-16BE", start[:8:2], start[1:8:2])):
        if zeros and not any(zeros) and all(characters[: len(zeros)]):
            nul = 1 + start.index(0)
            raise DataError(f"{path}:1: byte {nul} is NUL: looks like {name}; convert it: `iconv -f {name} -t UTF-8`")


def _decoded(raw: bytes, path: Path, number: int, before: int, problems: Problems, encoding: str | None) -> str:
    if before == 0 and raw.startswith(codecs.BOM_UTF8):
        if number > 1:  # at the start, programs for Windows write one; elsewhere two files were put together
            problems.add(
                f"{path}:{number}: bytes 1 to 3 of the line are a byte order mark (0xEFBBBF), not text; remove it: "
                "`sed -i 's/^\\xEF\\xBB\\xBF//' FILE`"
            )
        raw, before = raw.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
    if b"\0" in raw:
        location = f"{path}:{number}: byte {before + raw.index(0) + 1} of the line"
        problems.add(f"{location} is NUL, not text; the file was cut off or overwritten, create or download it again")
        raw = raw.replace(b"\0", b" ")
    try:
        return raw.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        location = f"{path}:{number}: byte {before + error.start + 1} of the line"
        byte = raw[error.start : error.start + 1]
        if encoding:
            problems.add(f"{location} is neither UTF-8 nor {encoding}: 0x{byte.hex().upper()}; correct `data.encoding`")
            return raw.decode(encoding, errors="replace")
        guess = byte.decode("cp1252", errors="ignore")
        cure = "convert the file"
        if guess:
            cure = f"if that is `{guess}`, set `data.encoding: cp1252` (Windows-1252), else convert the file"
        problems.add(f"{location} is not UTF-8: 0x{byte.hex().upper()}; {cure}")
        return raw.decode(errors="replace")
