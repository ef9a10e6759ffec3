"""What rows show beside their text: `Media`, the one object that is asked for its tokens, its tensors and its cost.

Preparation, batches, answers, exports and the forecast ask it, and know nothing else of what is shown. TEXT_ALONE is
that of rows of text; `vision.Vision`, that of a base that sees, answers for images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.data.encoded import RowImage
from finetune.data.examples import Chat, Content, Example, RowError, Several, media_in

if TYPE_CHECKING:
    import torch

Input = TypeVar("Input")
Made = TypeVar("Made")

NOT_SEEN = (
    "the row has images, and of the base only the language layers are loaded; set `model.vision: frozen` for a base "
    "that sees, or remove the row"
)


class Media:
    """Shows nothing, and is false; a subclass answers for what its base takes beside text."""

    def __bool__(self) -> bool:
        """Whether rows may show anything."""
        return False

    # -- in preparation ------------------------------------------------------------------------------------------

    def measured(self, content: Content, folder: Path | None) -> Content:
        """`content` with the size and the text of each image; paths are relative to `folder`.

        Raises RowError for a file that is missing, has too many pixels or cannot be decoded, or that the base does not
        see.
        """
        if isinstance(content, Several):
            segments = {name: self.measured_example(each, folder) for name, each in content.segments.items()}
            return replace(content, segments=segments)
        return self.measured_example(content, folder)

    def measured_example(self, example: Example, folder: Path | None) -> Example:
        """`measured`, of one example."""
        if not isinstance(example, Chat) or not example.images:
            return example
        return replace(example, images=tuple(self.measured_image(image, folder) for image in example.images))

    def measured_image(self, image: RowImage, folder: Path | None) -> RowImage:
        """`measured`, of one image."""
        raise RowError(NOT_SEEN)

    def check_tokens(self, ids: Sequence[int], shown: Iterable[RowImage]) -> None:
        """Raise RowError for tokens of images that the row does not have, as rows tokenized elsewhere may."""

    def each(self, work: Callable[[Input], Made], items: Iterable[Input]) -> Iterable[Made]:
        """`work` on each item, in order; `work` may measure what is shown."""
        return map(work, items)

    # -- in batches ----------------------------------------------------------------------------------------------

    def areas(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of what each prepared row shows; none where rows show nothing."""
        return []

    def inputs(self, rows: Sequence[Mapping[str, Any]], ids: torch.Tensor) -> dict[str, Any]:
        """What a micro-batch of prepared rows has beside its tokens `ids` (sequences, tokens).

        As `encoded.MEDIA` the model's arguments for each row; none if no row shows anything.
        """
        return {}

    def arguments(self, rows: Sequence[Sequence[RowImage]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's arguments beside the tokens `ids` (rows, tokens) of rows that show these, on their device."""
        return {}

    # -- in the forecast -----------------------------------------------------------------------------------------

    def white(self) -> Media:
        """The same for rows of which only the sizes of images are known: they are white, and have no values."""
        return self

    def showing(self, row: dict[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
        """A row in which the tokens of images of these sizes (`encoded.MEDIA_SIZES`) replace the first ones."""
        return row

    def nbytes(self, sizes: Iterable[Sequence[int]]) -> int:
        """Bytes of what rows of these sizes (`encoded.MEDIA_SIZES`) show, as it waits for its pass."""
        return 0

    # -- in an export --------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The contents of the processor's file, with the job's bounds."""
        return {}


TEXT_ALONE = Media()


@dataclass(frozen=True)
class Shown:
    """What several measured rows show, which becomes tensors when the model gets them; by default nothing."""

    media: Media = TEXT_ALONE
    rows: Sequence[Sequence[RowImage]] = ()

    @classmethod
    def by(cls, prompts: Sequence[Example], media: Media) -> Shown:
        """What prompts show."""
        return cls(media, [media_in(prompt) for prompt in prompts])

    def arguments(self, ids: torch.Tensor, numbers: Iterable[int]) -> dict[str, torch.Tensor]:
        """The model's arguments beside the tokens `ids` (rows, tokens) of the rows of these numbers, on their device.

        None if no row shows anything. Raises DataError for a file that is not as it was in preparation.
        """
        return self.media.arguments([self.rows[number] for number in numbers] if self.rows else [], ids)


NOTHING = Shown()

_OF_TILES = 5  # dimensions of pixels (rows, tiles, channels, height, width)


def joined(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The model's arguments for what several rows show; rows without any have none.

    Tiles are (1, tiles, ...), as if all were of one row: models take them in order, and none is black to fill a row up.
    """
    import torch

    there = [row for row in rows if row]
    if not there:
        return {}
    if there[0]["pixel_values"].dim() == _OF_TILES:
        return {name: torch.cat([row[name] for row in there], dim=1) for name in there[0]}
    result = {}
    for name in there[0]:
        values = [row[name] for row in there]
        largest = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
        result[name] = whole = values[0].new_zeros((sum(map(len, values)), *largest))
        start = 0
        for value in values:
            whole[(slice(start, start + len(value)), *map(slice, value.shape[1:]))] = value
            start += len(value)
    return result
