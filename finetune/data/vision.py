"""What turns images into tokens and pixels: the processor of a base that sees, and the count of an image's tokens.

transformers' processor counts them from an image's size (`_get_num_multimodal_tokens`). Where they are one run between
fixed texts, nothing more is needed; other families are an entry in FAMILIES. Either way the processor makes a few blank
images at the start, and every image of a batch, whose tokens must be those of their sizes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.config import ModelSection
from finetune.data import images
from finetune.data.batching import area
from finetune.data.encoded import MEDIA, MEDIA_SIZES, RowImage
from finetune.data.examples import RowError
from finetune.data.media import Input, Made, Media, joined
from finetune.errors import ArtifactError, ConfigError, MachineError, first_line
from finetune.model.source.locate import hub_call, locate
from finetune.model.source.tokenizer import processor_settings
from finetune.model.structure import composite


@dataclass(frozen=True)
class VisionFamily:
    """How the bases of a model type treat images.

    `bound(images, pixels)` returns the arguments with which the image processor makes at most so many pixels of an
    image; None if their number is fixed. `made(processor, height, width)` returns what the processor's
    `replace_image_token` reads of an image of that size, if its tokens are not one run. `processor` is the name of
    transformers' class for images, if the base's own requires packages that images do not need.
    """

    bound: Callable[[Any, int], dict[str, Any]] | None = None
    made: Callable[[Any, int, int], dict[str, Any]] | None = None
    processor: str | None = None


def _bound_area(images: Any, pixels: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": min(images.size["shortest_edge"], pixels), "longest_edge": pixels}}


def _bound_edge(images: Any, pixels: int) -> dict[str, Any]:
    return {"size": {"longest_edge": min(max(1, math.isqrt(pixels)), images.size["longest_edge"])}}


def _bound_square(images: Any, pixels: int) -> dict[str, Any]:
    tile = images.max_image_size["longest_edge"]
    edge = max(1, math.isqrt(pixels) // tile) * tile
    return {"size": {"longest_edge": min(edge, images.size["longest_edge"])}}


def _bound_tiles(images: Any, pixels: int) -> dict[str, Any]:
    tiles = pixels // (images.size["height"] * images.size["width"])
    return {"max_patches": min(max(1, tiles), images.max_patches)}


_SOFT_TOKENS = (70, 140, 280, 560, 1120)  # all that transformers' image processor of Gemma 4 takes


def _bound_tokens(images: Any, pixels: int) -> dict[str, Any]:
    tokens = min(pixels // (images.patch_size * images.pooling_kernel_size) ** 2, images.max_soft_tokens)
    return {"max_soft_tokens": max((_SOFT_TOKENS[0], *(number for number in _SOFT_TOKENS if number <= tokens)))}


def _tiles(processor: Any, height: int, width: int) -> dict[str, Any]:
    _, rows, columns = processor.image_processor.get_number_of_image_patches(height, width)
    return {"rows": [[rows]], "cols": [[columns]]}


def _resized(processor: Any, height: int, width: int) -> dict[str, Any]:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    blank = np.broadcast_to(np.uint8(0), (height, width, 3))  # only its size is read
    edge, patch = processor.image_processor.size["longest_edge"], processor.patch_size * processor.spatial_merge_size
    return {"image_sizes": [get_resize_output_image_size(blank, edge, patch)]}


_QWEN = VisionFamily(_bound_area)

FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": VisionFamily(),
    "gemma4": VisionFamily(_bound_tokens),
    "idefics3": VisionFamily(_bound_square, _tiles),
    # Its own processor needs num2words for videos; for images both write the same.
    "smolvlm": VisionFamily(_bound_square, _tiles, "Idefics3Processor"),
    "internvl": VisionFamily(_bound_tiles),
    "mistral3": VisionFamily(_bound_edge, _resized),
}
"""By transformers' `model_type`. Bases of other types are taken if what the processor makes shows that it can count."""

PIXELS = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes", "image_position_ids")
"""The model's arguments for images; those of its other arguments that a processor may make are of tokens."""

_MOST_READ = 2**20  # numbers: a processor's output of more is of pixels

_TRIED = ((40, 40), (40, 120), (700, 500))  # heights and widths of the blank images


class Vision(Media):
    """The images of a base: `mark` is what its chat template writes for one, and `image_tokens` are the ids of tokens
    that stand for its features, of which `token` is the text. `token_types` is the model's argument that says which
    tokens are of images. `bounded` gives the same with a bound of pixels; None where they are fixed.
    `tensors_of` makes the model's arguments for the images of a prepared row.

    Raises ArtifactError for a tokenizer without them, and ConfigError for a processor that makes other tokens of an
    image than it counts from its size.
    """

    def __init__(self, processor: Any, architecture: Any, family: VisionFamily) -> None:
        self._processor, self._family = processor, family
        self._kind = architecture.model_type
        self._arguments = inspect.signature(composite.seeing_class(architecture).forward).parameters
        self.mark: str = processor.image_token
        vocabulary = processor.tokenizer.get_vocab()
        ids = [getattr(architecture, name, None) for name in ("image_token_id", "image_token_index")]
        known = {id: token for token, id in vocabulary.items() if id in ids}
        if self.mark not in vocabulary or not known:
            missing = self.mark if known else ids[0]
            raise ArtifactError(
                f"the tokenizer has no token `{missing}`, which stands for an image; set `model.tokenizer` to the one "
                "of the base"
            )
        [(id, self.token)] = known.items()
        self.image_tokens: list[int] = [id]
        types = (name for name in ("mm_token_type_ids", "token_type_ids") if name in self._arguments)
        self.token_types = next(types, None) if processor.return_mm_token_type_ids else None
        self._around = "", ""
        self._uncounted = 0
        self.text = functools.lru_cache(maxsize=4096)(self._text)
        self._white_of = functools.lru_cache(maxsize=4096)(self._pixels_of_blank)
        self.tensors_of = self._decoded
        self.bounded: Callable[[int], Vision] | None = None
        try:
            self._try()
        except ConfigError:
            raise
        except Exception as error:  # processors of any kind may raise anything
            raise self._refusal(f"fails on a blank image ({type(error).__name__}: {first_line(error)})") from error

    def _text(self, height: int, width: int) -> str:
        """What takes the place of `mark` for an image of this size. Raises what the processor does."""
        if self._family.made:
            return str(self._processor.replace_image_token(self._family.made(self._processor, height, width), 0))
        before, after = self._around
        return before + self.token * (self._processor.count(height, width) + self._uncounted) + after

    def count(self, height: int, width: int) -> int:
        """The number of tokens that stand for an image of this size."""
        return self.text(height, width).count(self.token)

    def _try(self) -> None:
        """Learn from blank images what is around the tokens of one, and that they are as many as their size says."""
        if not (self._family.made or self._processor.counts):
            raise self._refusal("does not count the tokens of an image from its size")
        for number, (height, width) in enumerate(_TRIED):
            text = self._processor.processed([self._blank(height, width)])[1][0]
            if number == 0 and not self._family.made:
                tokens = text.count(self.token)
                before, run, after = text.partition(self.token * tokens)
                if not (tokens and run):
                    raise self._refusal("does not write the tokens of an image in one run")
                self._around, self._uncounted = (before, after), tokens - self._processor.count(height, width)
            if text != self._text(height, width):
                raise self._refusal(f"makes other tokens of an image of {width} x {height} pixels than its size says")
        made = self.sample()
        if others := made.keys() - {*PIXELS, "input_ids", "attention_mask", self.token_types}:
            raise self._refusal(f"gives the model `{min(others)}`, which is not passed on here")
        if made["input_ids"][0].tolist() != self._processor.tokenizer(self._text(*_TRIED[0]))["input_ids"]:
            raise self._refusal("adds tokens of its own to a row with an image")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"`model.vision`: images are not trained on with a base of type `{self._kind}`: its processor {why}; set "
            f"`none` to train on rows of text, or use a base of one of the types {', '.join(FAMILIES)}"
        )

    @staticmethod
    def _blank(height: int, width: int) -> Any:
        from PIL import Image

        return Image.new("RGB", (width, height))

    def sample(self) -> dict[str, torch.Tensor]:
        """The model's arguments for a row of a blank image alone, made by transformers' processor."""
        made = self._processor(text=[self.mark], images=[[self._blank(*_TRIED[0])]], return_tensors="pt")
        return {name: made[name] for name in made if name in self._arguments}

    def pixels(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The model's arguments for the images of one row, Pillow's, beside its tokens.

        Raises ArtifactError if the processor's own tokens for them are not those of their sizes.
        """
        made, texts = self._processor.processed(images)
        for image, text in zip(images, texts, strict=True):
            if text != self.text(image.height, image.width):
                raise ArtifactError(
                    f"the processor of a base of type `{self._kind}` makes other tokens of an image of {image.width} x "
                    f"{image.height} pixels than its size says, so it cannot be trained on; set `model.vision: none`"
                )
        return {name: made[name] for name in PIXELS if name in made and name in self._arguments}

    def _pixels_of_blank(self, sizes: tuple[tuple[int, int], ...]) -> dict[str, torch.Tensor]:
        """`pixels` of blank images of these sizes (height, width), without what no size follows from.

        The numbers of pixels, and masks of single ones, are on the meta device.
        """
        made = self.pixels([self._blank(*size) for size in sizes])
        return {
            name: value.to("meta") if value.is_floating_point() or value.numel() > _MOST_READ else value
            for name, value in made.items()
        }

    # -- as Media ------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return True

    def measured_image(self, image: RowImage, folder: Path | None) -> RowImage:
        image = images.measured(image, folder, self.text)
        return replace(image, mark=self.mark, tokens=image.text.count(self.token))

    def check_tokens(self, ids: Sequence[int], shown: Iterable[RowImage]) -> None:
        there = sum(map(ids.count, self.image_tokens))
        if there != (wanted := sum(image.text.count(self.token) for image in shown)):
            raise RowError(
                f"it has {there} tokens `{self.token}`, which stand for images, and {wanted} for the images of the "
                "row; show images as parts of messages, and set `data.control_tokens: text`"
            )

    def each(self, work: Callable[[Input], Made], items: Iterable[Input]) -> list[Made]:
        return images.in_threads(work, items)

    def areas(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        return [area(row[MEDIA_SIZES]) for row in rows]

    def inputs(self, rows: Sequence[Mapping[str, Any]], ids: torch.Tensor) -> dict[str, Any]:
        if not any(row.get(MEDIA_SIZES) for row in rows):
            return {}
        made = images.in_threads(self.tensors_of, rows)
        # Copied, since what another thread allocates is not counted (runtime/live_tensors.py).
        own = [{name: value.clone() for name, value in each.items()} for each in made]
        return {MEDIA: own, **self._types(ids)}

    def arguments(self, rows: Sequence[Sequence[RowImage]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if not any(rows):
            return {}
        seen = joined([self._decoded({MEDIA: list(map(vars, row))}) for row in rows])
        return {**self._types(ids), **{name: value.to(ids.device) for name, value in seen.items()}}

    def white(self) -> Vision:
        white = copy.copy(self)
        white.tensors_of = self._white
        return white

    def showing(self, row: dict[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
        # A token of text keeps images apart.
        ids = [token for count in sizes[2::3] for token in (0, *self.image_tokens[:1] * count)]
        return {**row, "input_ids": ids + row["input_ids"][len(ids) :], MEDIA_SIZES: sizes}

    def nbytes(self, sizes: Iterable[Sequence[int]]) -> int:
        rows = (self._white({MEDIA_SIZES: each}) for each in sizes)
        return sum(value.nbytes for row in rows for value in row.values())

    def _decoded(self, row: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The model's arguments for the images of a prepared row; none for a row without any."""
        return self.pixels([images.decoded(image) for image in row[MEDIA]]) if row[MEDIA] else {}

    def _white(self, row: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """White images of the sizes of a row's."""
        sizes = row.get(MEDIA_SIZES, ())
        return self._white_of(tuple(zip(sizes[::3], sizes[1::3], strict=True))) if sizes else {}

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self._processor.image_processor.to_dict()
        return settings

    def _types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's argument, if it has one, for which of the tokens `ids` (rows, tokens) stand for images."""
        if not self.token_types:
            return {}
        return {self.token_types: torch.isin(ids, torch.tensor(self.image_tokens, device=ids.device)).long()}


def of(section: ModelSection, pixels: int | None, architecture: Any, tokenizer: Any) -> Vision:
    """The vision of a base on rows with images of at most `pixels`, where that is given.

    Raises ConfigError for a base whose images are not trained on here, and for a bound on pixels that it does not have.
    """
    composite.seeing_class(architecture)
    family = FAMILIES.get(architecture.model_type, VisionFamily())
    processor = _image_processor(section)
    if pixels and not family.bound:
        raise ConfigError(f"`data.image_pixels`: {section.name} makes the same pixels of any image; remove it")

    @functools.cache
    def bounded(pixels: int | None) -> Vision:
        own = _image_processor(section, **family.bound(processor, pixels)) if pixels and family.bound else processor
        seeing = Vision(_processor(section, architecture, family, own, tokenizer), architecture, family)
        seeing.bounded = bounded if family.bound else None
        return seeing

    return bounded(pixels)


class _OfImages:
    """What transformers' processors do for images inside their calls; this class is made a part of theirs."""

    _merge_kwargs: Callable[[], Mapping[str, Any]]
    _process_images: Callable[..., tuple[Mapping[str, Any], list[str]]]
    _get_num_multimodal_tokens: Callable[..., Mapping[str, Any]]

    @property
    def counts(self) -> bool:
        """Whether it counts the tokens of an image from its size."""
        return hasattr(self, "_get_num_multimodal_tokens")

    def count(self, height: int, width: int) -> int:
        """The number of tokens for an image of this size."""
        return int(self._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        return self._merge_kwargs()["images_kwargs"] | {"return_tensors": "pt"}

    def processed(self, images: Sequence[Any]) -> tuple[Mapping[str, Any], list[str]]:
        """What is made of the images of one row, and the text that takes the place of each."""
        return self._process_images([list(images)], **self._options)


def _processor(section: ModelSection, architecture: Any, family: VisionFamily, images: Any, tokenizer: Any) -> Any:
    """transformers' processor of the base with its image processor and its tokenizer, but none of films or sound.

    Those of films need torchvision. Raises MachineError where that of images does, too.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if not family.processor and type(architecture) not in PROCESSOR_MAPPING:
        raise ConfigError(
            f"`model.vision`: transformers has no processor for a base of type `{architecture.model_type}`; set `none`"
        )
    known = getattr(transformers, family.processor) if family.processor else PROCESSOR_MAPPING[type(architecture)]
    settings = processor_settings(section)
    try:
        parts = dict.fromkeys(known.get_attributes()) | {"image_processor": images, "tokenizer": Unchanged(tokenizer)}
        names = inspect.signature(known.__init__).parameters.keys() - parts.keys()
        of_images = type(known.__name__, (_OfImages, known), {"check_argument_for_proper_class": lambda *_: None})
        return of_images(**parts, **{name: settings[name] for name in names if name in settings})
    except ImportError as error:
        packages = ", ".join(getattr(known, "_backends", [])) or first_line(error)
        raise MachineError(
            f"`model.vision`: transformers' processor of a base of type `{architecture.model_type}` needs packages "
            f"that are not installed: pip install {packages}"
        ) from None
    except AttributeError as error:
        raise ArtifactError(
            f"the tokenizer lacks what the processor of a base of type `{architecture.model_type}` reads of it "
            f"({first_line(error)}); set `model.tokenizer` to the one of the base"
        ) from None


class Unchanged:
    """A tokenizer to which processors add no tokens, as that of Gemma 4 would one of films."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._tokenizer(*texts, **options)

    def add_special_tokens(self, *_: Any, **__: Any) -> int:
        """As many tokens as were added."""
        return 0


def _image_processor(section: ModelSection, **changed: Any) -> Any:
    """transformers' image processor of the base, on Pillow: pixels are the same with torchvision and without.

    Raises MachineError where it needs a package that is not here.
    """
    from transformers import AutoImageProcessor, __version__

    def load() -> Any:
        try:
            return AutoImageProcessor.from_pretrained(
                locate(section.name), revision=section.revision, trust_remote_code=False, backend="pil", **changed
            )
        except ImportError as error:  # such as torchvision for Mistral 3
            raise MachineError(
                f"`model.vision`: transformers {__version__} cannot read images here ({first_line(error)[:120]}); "
                "install torchvision"
            ) from None

    return hub_call(f"the image processor of `{section.name}`", load)
