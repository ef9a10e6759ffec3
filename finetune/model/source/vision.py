"""What turns images into tokens and pixels: the image processor of a base that sees, and the rule of its tokens.

How many tokens an image takes follows from its size alone, by the rule of transformers' processor. That is not made
whole: those that also take films cannot be without torchvision. A family of bases is one entry in FAMILIES.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from finetune.config import Config, ModelSection
from finetune.errors import ArtifactError, ConfigError
from finetune.model.source.locate import hub_call, locate


@dataclass(frozen=True)
class VisionFamily:
    """Bases with one processor, transformers' class of the name `processor`.

    `attributes(settings, tokenizer)` are those of the processor that its `replace_image_token` reads, from the settings
    in its file, and `counted(images, height, width)` what that reads of the processed images, from the size of one and
    the image processor. `bound` is the size for which that makes no more than so many pixels of an image; None where
    they are fixed. `fixed`: arguments of the image processor. `token_types`: the model's argument that says which
    tokens are of images.
    """

    processor: str
    attributes: Callable[[Mapping[str, Any], Any], dict[str, Any]]
    counted: Callable[[Any, int, int], dict[str, Any]]
    bound: Callable[[Any, int], dict[str, int]] | None = None
    fixed: Mapping[str, Any] | None = None
    token_types: str | None = None


def _qwen(settings: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    return {"image_token": getattr(tokenizer, "image_token", None) or "<|image_pad|>"}


def _patches(images: Any, height: int, width: int) -> dict[str, Any]:
    return {"image_grid_thw": np.array([[1, images.get_number_of_image_patches(height, width), 1]])}


def _bound_area(images: Any, pixels: int) -> dict[str, int]:
    return {"shortest_edge": min(images.size["shortest_edge"], pixels), "longest_edge": pixels}


def _idefics(settings: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    return {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_tag": "<global-img>",  # Idefics 3
        "global_image_token": "<global-img>",  # SmolVLM
        "image_seq_len": settings.get("image_seq_len", 169),
    }


def _tiles(images: Any, height: int, width: int) -> dict[str, Any]:
    _, rows, columns = images.get_number_of_image_patches(height, width)
    return {"rows": [[rows]], "cols": [[columns]]}


def _bound_tiles(images: Any, pixels: int) -> dict[str, int]:
    tile = images.max_image_size["longest_edge"]
    edge = max(1, math.isqrt(pixels) // tile) * tile
    return {"longest_edge": min(edge, images.size["longest_edge"])}


def _gemma(settings: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    names = {"boi": "<start_of_image>", "image": "<image_soft_token>", "eoi": "<end_of_image>"}
    first, token, last = (getattr(tokenizer, f"{name}_token", None) or usual for name, usual in names.items())
    sequence = f"\n\n{first}{token * settings.get('image_seq_length', 256)}{last}\n\n"
    return {"image_token": first, "full_image_sequence": sequence, "soft_token": token}


def _whole(images: Any, height: int, width: int) -> dict[str, Any]:
    return {"num_crops": [0]}


_ROWS_AND_COLUMNS = {"return_row_col_info": True}

FAMILIES: dict[str, VisionFamily] = {
    "qwen3_vl": VisionFamily("Qwen3VLProcessor", _qwen, _patches, _bound_area, token_types="mm_token_type_ids"),
    "idefics3": VisionFamily("Idefics3Processor", _idefics, _tiles, _bound_tiles, _ROWS_AND_COLUMNS),
    "gemma3": VisionFamily(
        "Gemma3Processor", _gemma, _whole, fixed={"do_pan_and_scan": False}, token_types="token_type_ids"
    ),
}
"""By transformers' `model_type`."""

PIXELS = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
"""The model's arguments for images, of those that image processors make."""


class Vision:
    """The images of a base: `mark` is what its chat template writes for one, and `image_tokens` are the ids of tokens
    that stand for its features, of which `token` is the text. Raises ArtifactError for a tokenizer without them.
    """

    def __init__(self, family: VisionFamily, images: Any, settings: Mapping[str, Any], tokenizer: Any) -> None:
        import transformers

        self._family, self._images = family, images
        self._rule = getattr(transformers, family.processor).replace_image_token
        self._processor = SimpleNamespace(image_processor=images, **family.attributes(settings, tokenizer))
        self.mark: str = self._processor.image_token
        token = getattr(self._processor, "soft_token", self.mark)
        if missing := [one for one in (self.mark, token) if one not in tokenizer.get_vocab()]:
            raise ArtifactError(
                f"the tokenizer has no token `{missing[0]}`, which stands for an image; set `model.tokenizer` to the "
                "one of the base"
            )
        self.token: str = token
        self.image_tokens: list[int] = [tokenizer.convert_tokens_to_ids(token)]
        self.token_types = family.token_types
        self.text = functools.lru_cache(maxsize=4096)(self._text)

    def _text(self, height: int, width: int) -> str:
        """What takes the place of `mark` for an image of this size. Raises what the processor does."""
        return str(self._rule(self._processor, self._family.counted(self._images, height, width), 0))

    def pixels(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The model's arguments for the images of one row, Pillow's, beside its tokens.

        Raises ArtifactError if the processor's own tokens for them are not those of their sizes.
        """
        made = self._images([list(images)], return_tensors="pt", **(self._family.fixed or {}))
        for number, image in enumerate(images):
            if self._rule(self._processor, made, number) != self.text(image.height, image.width):
                raise ArtifactError(
                    f"{self._family.processor} makes other tokens of an image of {image.width} x {image.height} pixels "
                    "than its size says, so it cannot be trained on; set `model.vision: none`"
                )
        return {name: made[name] for name in PIXELS if name in made}

    def settings(self) -> dict[str, Any]:
        """The contents of the image processor's file, with the job's bound on pixels."""
        settings: dict[str, Any] = self._images.to_dict()
        return settings

    def types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's argument, if it has one, for which of the tokens `ids` (rows, tokens) stand for images."""
        if not self.token_types:
            return {}
        return {self.token_types: torch.isin(ids, torch.tensor(self.image_tokens, device=ids.device)).long()}


def joined(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The model's arguments for the images of several rows; rows without any have none.

    Tiles are (rows, tiles, ...): a row of fewer gets black ones, which the model leaves out.
    """
    there = [row for row in rows if row]
    return {name: _joined([row[name] for row in there]) for name in PIXELS if there and name in there[0]}


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    largest = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    whole = values[0].new_zeros((sum(map(len, values)), *largest))
    start = 0
    for value in values:
        whole[(slice(start, start + len(value)), *map(slice, value.shape[1:]))] = value
        start += len(value)
    return whole


def of(config: Config, architecture: Any, tokenizer: Any) -> Vision | None:
    """The vision of a job; None if it trains on rows of text alone.

    Raises ConfigError for a base of no family here, and for a bound on pixels that it does not have.
    """
    if config.model.vision == "none":
        return None
    section, kind, pixels = config.model, architecture.model_type, config.data.image_pixels
    if kind not in FAMILIES:
        raise ConfigError(
            f"`model.vision`: images are not trained on here with a base of type `{kind}`, but with one of "
            f"{', '.join(FAMILIES)}; set `none` to train on rows of text"
        )
    family, images = FAMILIES[kind], _image_processor(section)
    if pixels and not family.bound:
        raise ConfigError(f"`data.image_pixels`: {section.name} makes the same pixels of any image; remove it")
    if pixels and family.bound:
        images = _image_processor(section, size=family.bound(images, pixels))
    return Vision(family, images, _settings(section), tokenizer)


def _image_processor(section: ModelSection, **changed: Any) -> Any:
    from transformers import AutoImageProcessor

    def load() -> Any:
        return AutoImageProcessor.from_pretrained(
            locate(section.name), revision=section.revision, trust_remote_code=False, **changed
        )

    return hub_call(f"the image processor of `{section.name}`", load)


def _settings(section: ModelSection) -> Mapping[str, Any]:
    """What the file of the base's processor says, beside its image processor."""
    from transformers import ProcessorMixin

    def load() -> Any:
        return ProcessorMixin.get_processor_dict(locate(section.name), revision=section.revision)[0]

    settings: Mapping[str, Any] = hub_call(f"the processor of `{section.name}`", load)
    return settings


def chat_template(section: ModelSection) -> str | None:
    """The chat template of the base's processor, which older checkpoints have beside that of the tokenizer."""
    return _settings(section).get("chat_template")
