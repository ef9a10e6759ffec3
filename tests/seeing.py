"""Tiny bases that see, with random weights and the real processor of their family, and images for them."""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}

_CHATML = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
_GEMMA = (
    "<bos>{%- for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<start_of_image>{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}<end_of_turn>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<start_of_turn>model\n{%- endif %}"
)
# As published: a text that is not a list of parts is taken for a list of characters, and left out.
_IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def _tokenizer(special: list[str], ends: str, pad: str, **named: str) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(["a red square and a blue circle"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=ends, pad_token=pad, extra_special_tokens=dict(named)
    )


def qwen3_vl() -> tuple[Any, Any]:
    """A model and its processor: one token for 8 x 8 pixels, two layers of the tower read again by the decoder."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    seen = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer([*special, *seen], "<|im_end|>", "<|endoftext|>")
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    pictures = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    films = Qwen3VLVideoProcessor(patch_size=4, merge_size=2, temporal_patch_size=2)
    with pytest.MonkeyPatch.context() as patch:  # it would look for torchvision, which its films need
        patch.setattr(Qwen3VLProcessor, "check_argument_for_proper_class", lambda *_: None)
        processor = Qwen3VLProcessor(pictures, tokenizer, films, chat_template=_CHATML)
    text = {
        **_TEXT,
        "vocab_size": len(tokenizer),
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
    }
    tower = {
        **_TOWER,
        "depth": 3,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    ), processor


def gemma3() -> tuple[Any, Any]:
    """A model and its processor: four tokens for any image, which see each other."""
    special = [
        "<eos>",
        "<pad>",
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ]
    tokenizer = _tokenizer(
        special,
        "<eos>",
        "<pad>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    pictures = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = Gemma3Processor(pictures, tokenizer, chat_template=_GEMMA, image_seq_length=4)
    text = {
        **_TEXT,
        "vocab_size": len(tokenizer),
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
    }
    tower = {**_TOWER, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    ids = {
        "image_token_index": tokenizer.image_token_id,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
    }
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, **ids)
    ), processor


def idefics3() -> tuple[Any, Any]:
    """A model and its processor: four tokens for each tile of 32 x 32 pixels, and for the whole image."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = [
        "<|im_start|>",
        "<end_of_utterance>",
        "<pad>",
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
        *tiles,
    ]
    tokenizer = _tokenizer(special, "<end_of_utterance>", "<pad>")
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=_IDEFICS)
    text = {**_TEXT, "model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    tower = {**_TOWER, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "pad_token_id": tokenizer.pad_token_id}
    return Idefics3ForConditionalGeneration(
        Idefics3Config(text_config=text, vision_config=tower, scale_factor=2, tie_word_embeddings=False, **ids)
    ), processor


ENDS = ("<|im_end|>", "<end_of_turn>", "<end_of_utterance>")
"""The tokens that end a turn."""

FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {"qwen3_vl": qwen3_vl, "gemma3": gemma3, "idefics3": idefics3}


def base(folder: Path, family: str) -> Path:
    """A checkpoint of a family in `folder`, with weights that are far enough from zero to tell images apart."""
    torch.manual_seed(0)
    model, processor = FAMILIES[family]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(folder: Path, name: str, size: tuple[int, int], seed: int = 0) -> str:
    """The name of a new PNG file of random pixels, (width, height)."""
    values = random.Random(seed).randbytes(3 * size[0] * size[1])
    Image.frombytes("RGB", size, values).save(folder / name)
    return name


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of so many pixels to a side by its header, of a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(99))), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def rows(folder: Path, several: list[Mapping[str, Any]], name: str = "rows.jsonl") -> Path:
    """A data file in `folder`."""
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in several), encoding="utf-8")
    return file
