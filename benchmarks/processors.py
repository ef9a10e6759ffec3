"""Folders with the tokenizer and the processor of a small base that sees, and rows with images for it."""

from __future__ import annotations

import functools
import importlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

Size = tuple[int, int]
"""Height and width of an image in pixels."""

FIRST_TOKEN = 258
"""The id of a family's first token: before are those of bytes, the end of a text and padding."""


@dataclass(frozen=True)
class Family:
    """What is read of a base's processor.

    `tokens` are those that stand for images, by the attribute that the tokenizer has for them, if any. `images` is the
    class of the image processor, in the module of that name, with `sizes`; `settings` are the processor's own.
    """

    images: str
    module: str
    sizes: Mapping[str, Any]
    tokens: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def image_processor(self) -> Any:
        """The image processor, of those that need no torchvision."""
        module = importlib.import_module(f"transformers.models.{self.module}.image_processing_pil_{self.module}")
        return getattr(module, f"{self.images}ImageProcessorPil")(**self.sizes)


def _plain(*tokens: str) -> dict[str, str]:
    return {f" {token}": token for token in tokens}


def _qwen(patch: int) -> Family:
    size = {"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048}
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    seen = _plain("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return Family("Qwen2VL", "qwen2_vl", sizes, seen)


_GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_SOUND = {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
_TILES = _plain(
    "<fake_token_around_image>", "<image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip
_SQUARES = {"size": {"longest_edge": 448}, "max_image_size": {"longest_edge": 112}}
_INTERN = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen(14),
    "qwen2_5_vl": _qwen(14),
    "qwen3_vl": _qwen(16),
    "qwen3_5": _qwen(16),
    "gemma3": Family("Gemma3", "gemma3", {"size": {"height": 224, "width": 224}}, _GEMMA, {"image_seq_length": 64}),
    "gemma4": Family(
        "Gemma4", "gemma4", {"max_soft_tokens": 70, "patch_size": 16, "pooling_kernel_size": 3},
        {**_GEMMA, **_SOUND, **_plain("<|video|>")},
    ),
    "idefics3": Family("Idefics3", "idefics3", _SQUARES, _TILES, {"image_seq_len": 16}),
    "smolvlm": Family("SmolVLM", "smolvlm", _SQUARES, _TILES, {"image_seq_len": 16}),
    "internvl": Family(
        "GotOcr2", "got_ocr2", {"size": {"height": 112, "width": 112}, "max_patches": 6}, _INTERN,
        {"image_seq_length": 16},
    ),
}  # fmt: skip
"""By transformers' `model_type`."""


def token(model_type: str, name: str) -> int:
    """The id of a token of a family."""
    return FIRST_TOKEN + list(FAMILIES[model_type].tokens.values()).index(name)


@functools.cache
def folder(model_type: str) -> str:
    """A new folder, for as long as this process runs, with the files of a base's tokenizer and processor."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    family, path = FAMILIES[model_type], Path(_new_folder(model_type).name)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    named = ["<eos>", "<pad>", *family.tokens.values()]
    tokenizer.add_special_tokens([AddedToken(one, normalized=False, special=True) for one in named])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>",
        extra_special_tokens={name: one for name, one in family.tokens.items() if not name.startswith(" ")},
    )  # fmt: skip
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    made.save_pretrained(path)
    family.image_processor().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    (path / "processor_config.json").write_text(json.dumps(dict(family.settings)), encoding="utf-8")
    return str(path)


@functools.cache  # which keeps it until the process ends
def _new_folder(model_type: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f"{model_type}-")


def seen(vision: Any, sizes: Sequence[Size]) -> list[int]:
    """The height, width and tokens of each image, as prepared rows have them."""
    return [number for size in sizes for number in (*size, vision.count(*size))]


def shown(folder: Path, sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """Images of these sizes in one colour, written to `folder`, as prepared rows name them."""
    from finetune.data import cache

    named = []
    for height, width in sizes:
        file = folder / f"{height}x{width}.png"
        if not file.exists():
            Image.new("RGB", (width, height), (90, 160, 30)).save(file)
        digest = cache.digest_of(file.read_bytes())
        named.append({"path": str(file), "data": b"", "digest": digest, "height": height, "width": width})
    return named


def starts(vision: Any, sizes: Sequence[Size]) -> list[int]:
    """The tokens at the start of a row with images of these sizes: those that stand for them, text between."""
    counts = seen(vision, sizes)[2::3]
    return [token for count in counts for token in (8, *vision.image_tokens[:1] * count)]
