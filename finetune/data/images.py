"""Images of rows: where rows name them, their sizes in preparation, and their pixels when a batch is made.

An image is a file beside the data, or the bytes of one in a row; from Python also an image of Pillow, or an array of
its pixels. Nothing is fetched from a network.

{"type": "image", "image": ...}   a part of a message's content; also "path", "url" or "bytes", or OpenAI's image_url
{"type": "image"}                 the next of the row's column `images` (TRL)
<image>                           in the text of a message, likewise (LLaMA-Factory, ms-swift)

With a column, and neither in the messages, the images come before the first question (TRL).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.data import fields as row
from finetune.data.encoded import RowImage
from finetune.data.examples import Chat, Example, Message, RowError
from finetune.data.fields import Fields
from finetune.data.media import NOT_SEEN, Input, Made
from finetune.errors import DataError

COLUMNS = ("images", "image")
"""The fields of a row that may have its images."""

MARK = "<image>"
"""What stands for an image in the text of a message, if the row has a column of them."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the file formats that are read."""

THUMBNAIL = 160
"""The largest height and width of the small image that a page shows."""

_TOO_DEEP = "its pixels are of the kind {}; convert it to 8 bits a channel"
# Formats of more than 8 bits a channel would lose them without a word.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
# How an image ends, of the formats of which Pillow decodes some files without an end, such as those filled with zeros.
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
_MOST_BYTES = 2**28
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_KEYS = ("image", "path", "url", "bytes")
_THREADS = 4


# -- where rows name them --------------------------------------------------------------------------------------------


def part(value: Mapping[str, Any], where: str) -> RowImage:
    """The image of a part of a message's content; an empty one stands for the next of the row's column."""
    if value["type"] == "image_url":
        url = value.get("image_url")
        value = {"url": url.get("url") if isinstance(url, Mapping) else url}
        if value["url"] is None:
            raise RowError(f"`{where}.image_url` has no `url`; write the path of the image there, or a data URL")
    given = [key for key in _KEYS if value.get(key) is not None]
    if len(given) > 1:
        raise RowError(f"`{where}` names its image twice, as `{given[0]}` and `{given[1]}`; keep one of them")
    return _named(value[given[0]], f"{where}.{given[0]}") if given else RowImage()


def placed(messages: list[Message], fields: Fields) -> tuple[list[Message], tuple[RowImage, ...]]:
    """The messages with parts as chat templates expect them, and the images of all, those of the row's column too."""
    column = _column(fields)
    written: list[str | list[str | RowImage]] = [message["content"] for message in messages]
    contents: list[list[str | RowImage]] = [[one] if isinstance(one, str) else list(one) for one in written]
    shown = [one for parts in contents for one in parts if isinstance(one, RowImage)]
    if column and not shown:
        asks = [message["role"] == "user" for message in messages]
        for parts, asked in zip(contents, asks, strict=True):
            if asked:  # texts, with an empty image in place of each mark
                pieces = [piece for text in parts for piece in re.split(f"({re.escape(MARK)})", str(text))]
                placed = [RowImage() if piece == MARK else piece for piece in pieces if piece]
                parts[:] = placed or [""]
        shown = [one for parts in contents for one in parts if isinstance(one, RowImage)]
        if not shown and True in asks:
            contents[asks.index(True)][:0] = column
            return _with_parts(messages, contents), tuple(column)
    blank = sum(one == RowImage() for one in shown)
    if blank != len(column):
        raise RowError(
            f"the messages have {blank} places for images of the row, and `images` has {len(column)}; write as many of "
            "one as of the other"
        )
    following = iter(column)
    return _with_parts(messages, contents), tuple(next(following) if one == RowImage() else one for one in shown)


def placed_in(example: Example, fields: Fields) -> Example:
    """A person's prompt with the images of its row's column; without marks in it, before its text.

    Raises RowError for images of plain text.
    """
    if not _column(fields):
        return example
    if not isinstance(example, Chat):
        raise RowError("images are shown in conversations alone, and this run was trained on plain text")
    messages, shown = placed(example.messages, fields)
    return replace(example, messages=messages, images=shown)


def _with_parts(messages: list[Message], contents: list[list[str | RowImage]]) -> list[Message]:
    result = []
    for number, (message, parts) in enumerate(zip(messages, contents, strict=True)):
        if not any(isinstance(one, RowImage) for one in parts):
            result.append(message)
            continue
        if message["role"] != "user":
            raise RowError(
                f"message {number} is of the role `{message['role']}`: only the user shows images; move them to a "
                "message of the user, or remove the row"
            )
        named = [{"type": "image"} if isinstance(one, RowImage) else {"type": "text", "text": one} for one in parts]
        result.append({**message, "content": named})
    return result


def _column(fields: Fields) -> list[RowImage]:
    there = [name for name in COLUMNS if not row.is_nothing(fields.get(name))]
    if len(there) > 1:
        raise RowError("the row has `images` and `image`; keep one of them")
    if not there:
        return []
    [name] = there
    values = fields[name]
    if not isinstance(values, list):
        return [_named(values, name)]
    return [_named(value, f"{name}[{index}]") for index, value in enumerate(values)]


def _named(value: Any, where: str) -> RowImage:
    """The image that a path, bytes, a data URL or an object with `path` or `bytes` names, or one given from Python."""
    if hasattr(value, "tobytes") and not isinstance(value, (Mapping, bytes, str)):
        return RowImage(data=_as_png(value, where))
    if isinstance(value, Mapping):
        if value.get("bytes"):
            return _named(value["bytes"], f"{where}.bytes")
        value = value.get("path")
    if isinstance(value, bytes):
        return RowImage(data=value)
    if not isinstance(value, str) or not value:
        kind = "empty text" if value == "" else row.kind_of(value)
        raise RowError(f"`{where}` must be the path of an image, its bytes or a data URL, not {kind}")
    if match := _DATA_URL.match(value):
        try:
            return RowImage(data=base64.b64decode(value[match.end() :], validate=True))
        except binascii.Error as error:
            raise RowError(f"`{where}` is not base64: {error}; write the path of the image instead") from None
    if value.lower().startswith("data:"):
        raise RowError(f"`{where}` is {value[:60]!r}; a data URL of an image begins with `data:image/png;base64,`")
    if re.match(r"\w{2,}:", value):
        raise RowError(
            f"`{where}` is {value[:60]!r}: nothing is fetched; download the image, and write its path relative to the "
            "data file"
        )
    return RowImage(path=value)


def _as_png(value: Any, where: str) -> bytes:
    """A PNG file of Pillow's image or of an array of its pixels, (height, width) or with 3 or 4 channels."""
    from PIL import Image

    if not isinstance(value, Image.Image):
        try:
            _height, _width, *_ = value.shape  # Pillow would accept an array of one dimension
            value = Image.fromarray(value)
        except (TypeError, ValueError, AttributeError):
            raise RowError(
                f"`{where}` is not an array of an image: give one of uint8 and the shape (height, width, 3)"
            ) from None
    if value.mode not in _MODES:
        raise RowError(f"`{where}`: {_TOO_DEEP.format(value.mode)}")
    written = io.BytesIO()
    drawn = value.convert("RGB") if value.mode in ("PA", "CMYK", "YCbCr") else value  # PNG does not have these modes
    drawn.save(written, "PNG", compress_level=1, exif=value.getexif())
    return written.getvalue()


# -- sizes, in preparation -------------------------------------------------------------------------------------------


def measured(image: RowImage, folder: Path | None, text: Callable[[int, int], str]) -> RowImage:
    """`image` with its digest, its size and the `text` of an image of that height and width.

    Its path is relative to `folder`. Raises RowError for a file that is missing, has too many pixels or cannot be
    decoded.
    """
    from finetune.data import cache

    if image.path:
        image = replace(image, path=str(((folder or Path()) / image.path).absolute()))
    name = image.path or "an image"
    content = _content(image)
    digest = cache.digest_of(content)
    try:
        with _opened(content) as opened:
            if opened.mode not in _MODES:
                raise RowError(f"{name}: {_TOO_DEEP.format(opened.mode)}")
            if opened.format != "MPO" and getattr(opened, "is_animated", False):
                raise RowError(f"{name}: has several frames; save one of them, as only still images are trained on")
            # The header, which may hold a preview, has been read. Anything may follow the end, such as a phone's video.
            if opened.format in _ENDS and content.find(_ENDS[opened.format], opened.fp.tell()) < 0:
                raise RowError(f"{name}: the file is cut off; copy it again")
            # All pixels are decoded, as they are for a batch: damage shows before training.
            height, width = (pixels := _upright(opened)).height, pixels.width
        return replace(image, digest=digest, height=height, width=width, text=text(height, width))
    except RowError:
        raise
    except Exception as error:  # anything may be in a file, and a processor has limits of its own
        raise RowError(f"{name}: cannot be read as an image ({_why(error)}); replace it, or remove the row") from None


def _why(error: Exception) -> str:
    text = str(error).replace("<_io.BytesIO object at ", "").partition("\n")[0]
    return "it is of no format that is read: " + ", ".join(FORMATS) if "cannot identify" in text else text


def _content(image: RowImage) -> bytes:
    """The bytes of an image's file. Raises RowError if there is no such file, or it is enormous."""
    if not image.path:
        return image.data
    path = Path(image.path)
    try:
        regular, size = path.is_file(), 0
        if regular and 0 < (size := path.stat().st_size) <= _MOST_BYTES:
            return path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RowError(f"{path}: cannot be read: {why}; correct the path or the file") from None
    if regular and not size:  # files of /proc as well, some of which are read without end
        raise RowError(f"{path}: an empty file; replace it")
    if regular:
        raise RowError(
            f"{path}: {size:,} bytes, more than the {_MOST_BYTES:,} that are read of an image; save it smaller"
        )
    raise RowError(f"{path}: no such file, or not a regular one; paths in a data file are relative to its folder")


def in_threads(work: Callable[[Input], Made], items: Iterable[Input]) -> list[Made]:
    """`work` on each item, in threads, as Pillow and NumPy release the interpreter's lock while they work."""
    with _warnings(), ThreadPoolExecutor(_THREADS, "images") as workers:
        return list(workers.map(work, items))


@contextlib.contextmanager
def _warnings() -> Iterator[None]:
    """Make Pillow's warning of a decompression bomb an error, and ignore others.

    A block around threads restores the filters that theirs may leave, since `catch_warnings` is not thread-safe.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


@contextlib.contextmanager
def _opened(content: bytes) -> Iterator[Any]:
    """Pillow's image, whose header alone is read yet; its warning of a decompression bomb is an error."""
    from PIL import Image

    with _warnings(), Image.open(io.BytesIO(content), formats=FORMATS) as opened:
        yield opened


def _upright(opened: Any) -> Any:
    """The pixels of Pillow's image, upright and in RGB. Pillow raises errors of many kinds for a damaged file."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(opened).convert("RGB")


# -- the text that stands for them -----------------------------------------------------------------------------------


def spelled_out(
    text: str, marks: list[tuple[int, int]], images: tuple[RowImage, ...]
) -> tuple[str, list[tuple[int, int]]]:
    """A rendered conversation with the text of each image in place of its mark, and the spans of `marks` moved along.

    Raises RowError if the chat template does not write a mark for each image.
    """
    if not all(image.text for image in images):
        raise RowError(NOT_SEEN)
    mark = images[0].mark
    places = [found.span() for found in re.finditer(re.escape(mark), text)]
    if len(places) != len(images):
        raise RowError(
            f"the chat template writes `{mark}` {len(places)} times for {len(images)} images; set `data.chat_template` "
            "to one that writes it for each part of type `image`"
        )
    pieces, last = [], 0
    for (start, end), image in zip(places, images, strict=True):
        pieces += [text[last:start], image.text]
        last = end

    def moved(at: int) -> int:
        before = (image for (_, end), image in zip(places, images, strict=True) if end <= at)
        return at + sum(len(image.text) - len(mark) for image in before)

    return "".join([*pieces, text[last:]]), [(moved(start), moved(end)) for start, end in marks]


def as_in_rows(example: Chat) -> list[Message]:
    """The messages of an example as rows have them, with the paths of its images."""
    following = iter(example.images)

    def named(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**part, "path": next(following).path} if part["type"] == "image" else part

    return [
        {**message, "content": [*map(named, message["content"])]} if isinstance(message["content"], list) else message
        for message in example.messages
    ]


def shown_in(messages: list[Message]) -> int:
    """How many images messages show."""
    listed = (message["content"] for message in messages if isinstance(message["content"], list))
    return sum(one["type"] == "image" for content in listed for one in content)


# -- pixels, when a batch is made ------------------------------------------------------------------------------------


def decoded(image: Mapping[str, Any]) -> Any:
    """The pixels of an image of a prepared row, upright and in RGB, as a Pillow image.

    Raises DataError for a file that is not as it was in preparation.
    """
    from finetune.data import cache

    name = image["path"] or "an image"
    try:
        content = _content(RowImage(image["path"], image["data"]))
        if cache.digest_of(content) != image["digest"]:
            raise RowError(f"{name}: the file has changed since the rows were prepared")
        with _opened(content) as opened:
            return _upright(opened)
    except Exception as error:  # memory may run out, for one
        why = error if isinstance(error, RowError) else f"{name}: its pixels cannot be decoded ({_why(error)})"
        raise DataError(
            f"{why}. Put it back as it was, or put another image of {image['width']} x {image['height']} pixels in its "
            "place, and start again"
        ) from None


def thumbnail(image: Mapping[str, Any]) -> bytes:
    """A JPEG of an image of a prepared row, at most THUMBNAIL pixels high and wide. Raises as `decoded` does."""
    picture, written = decoded(image), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(written, "JPEG", quality=75)
    return written.getvalue()
