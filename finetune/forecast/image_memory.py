"""What an image takes of a job's memory: the largest image of its rows, and the largest that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from finetune.data.batching import LargestBatch, area
from finetune.data.media import Media
from finetune.forecast.job_forecast import Forecast

_LEAST_EDGE, _MOST_EDGE = 64, 8192  # pixels
# The ratio of one tried edge to the next: a quarter of an octave.
_STEP = 2**0.25


@dataclass(frozen=True)
class ImageMemory:
    """The largest image of a job's rows in pixels, the tokens that stand for it, and the memory that it takes in bytes.

    `most_pixels` is the largest `data.image_pixels` with which a row with one square image fits in memory and in
    `data.max_length`; None where a base makes the same pixels of any image, 0 where none fits.
    """

    height: int
    width: int
    tokens: int
    bytes: int
    most_pixels: int | None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def of(
    batch: LargestBatch,
    vision: Media,
    max_length: int,
    forecast: Callable[[LargestBatch, Media, int | None], Forecast],
) -> ImageMemory | None:
    """What images take beside the text of the longest row of `batch`; None if its rows show none.

    `forecast` is that of a batch of one row, with images of `vision` and a bound of pixels.
    """
    shown = [
        (seen[at + 2], seen[at], seen[at + 1], area(seen)) for seen in batch.images for at in range(0, len(seen), 3)
    ]
    if not shown:
        return None
    from finetune.data.vision import Vision

    assert isinstance(vision, Vision)
    tokens, height, width, own = max(shown)
    text = max(2, batch.tokens - own)

    def row(height: int, width: int, tokens: int) -> LargestBatch:
        trained = min(batch.trained_tokens, text - 1)
        return LargestBatch(1, text + tokens, False, trained, batch.source, images=((height, width, tokens),))

    one = row(height, width, tokens)
    none = replace(one, tokens=text, images=())
    taken = forecast(one, vision, None).needed_bytes - forecast(none, vision, None).needed_bytes
    if vision.bounded is None:
        return ImageMemory(height, width, tokens, taken, None)
    tried: dict[int, tuple[Vision, LargestBatch]] = {}  # by tokens
    edge = float(_LEAST_EDGE)
    while edge <= _MOST_EDGE:
        side, seeing = round(edge), vision.bounded(round(edge) ** 2)
        tried.setdefault(count := seeing.count(side, side), (seeing, row(side, side, count)))
        edge = edge * _STEP if text + count <= max_length else _MOST_EDGE + 1
    inside = [(seeing, each) for seeing, each in tried.values() if each.tokens <= max_length]

    def too_large(number: int) -> bool:
        seeing, each = inside[number]
        return not forecast(each, seeing, each.images[0][0] ** 2).fits

    fitting = bisect_left(range(len(inside)), True, key=too_large)
    return ImageMemory(height, width, tokens, taken, inside[fitting - 1][1].images[0][0] ** 2 if fitting else 0)
