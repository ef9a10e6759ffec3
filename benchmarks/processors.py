"""Folders with the tokenizer and the image processor of a small base that sees, and rows with images for it."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

Size = tuple[int, int]
"""Height and width of an image in pixels."""

TOKENS: dict[str, list[str]] = {
    "qwen3_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "idefics3": [
        "<fake_token_around_image>", "<image>", "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ],
}  # fmt: skip
"""By `model_type`, the tokens that stand for images, which are the first of the vocabulary."""

SETTINGS: dict[str, dict[str, Any]] = {"gemma3": {"image_seq_length": 64}, "idefics3": {"image_seq_len": 16}}
"""Of a processor beside its image processor: tokens of an image, or of a tile."""


def _qwen2_vl() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048}
    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, temporal_patch_size=2, size=size)


def _gemma3() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 224, "width": 224})


def _idefics3() -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 448}, max_image_size={"longest_edge": 112})


IMAGE_PROCESSORS: dict[str, Callable[[], Any]] = {"qwen3_vl": _qwen2_vl, "gemma3": _gemma3, "idefics3": _idefics3}


@functools.cache
def folder(model_type: str) -> str:
    """A new folder, for as long as this process runs, with the files of a base's tokenizer and processor."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = _kept()
    letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    named = ["<eos>", "<pad>", *TOKENS[model_type]]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in named])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    made.save_pretrained(path)
    IMAGE_PROCESSORS[model_type]().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    (path / "processor_config.json").write_text(json.dumps(SETTINGS.get(model_type, {})), encoding="utf-8")
    return str(path)


def _kept(kept: list[tempfile.TemporaryDirectory[str]] = []) -> Path:  # noqa: B006 -- lives as long as the process
    kept.append(tempfile.TemporaryDirectory(prefix="processor-"))
    return Path(kept[-1].name)


def seen(vision: Any, sizes: Sequence[Size]) -> list[int]:
    """The height, width and tokens of each image, as prepared rows have them."""
    return [number for size in sizes for number in (*size, vision.count(*size))]


def shown(folder: Path, sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """Grey images of these sizes, written to `folder`, as prepared rows name them."""
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
