"""Tiny bases that see, with random weights and the real processor of their family, and images for them."""

from __future__ import annotations

import importlib
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
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available

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


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _part(kind: str, module: str, name: str, **settings: Any) -> Any:
    """A part of a processor that needs no torchvision, of the class `name`; it is not among transformers' own names."""
    return getattr(importlib.import_module(f"transformers.models.{module}.{kind}_{module}"), name)(**settings)


def _processor(name: str, pictures: Any, tokenizer: Any, **settings: Any) -> Any:
    """transformers' processor, without what it needs for films and sound."""
    known = getattr(transformers, name)
    parts = dict.fromkeys(known.get_attributes()) | {"image_processor": pictures, "tokenizer": tokenizer}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known, "check_argument_for_proper_class", lambda *_: None)
        if name == "SmolVLMProcessor":  # it would look for num2words
            patch.setattr(importlib.import_module(known.__module__), "num2words", str)
        return known(**parts, **settings)


def _model(name: str, **config: Any) -> Any:
    known = getattr(transformers, f"{name}ForConditionalGeneration")
    return known(known.config_class(tie_word_embeddings=False, **config))


def _qwen(name: str, processor: str, text: dict[str, Any], tower: dict[str, Any]) -> tuple[Any, Any]:
    """A model and its processor: one token for 8 x 8 pixels."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    seen = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer([*special, *seen], "<|im_end|>", "<|endoftext|>")
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    patches = {"patch_size": 4, "temporal_patch_size": 2}
    pictures = _part("image_processing_pil", "qwen2_vl", "Qwen2VLImageProcessorPil", merge_size=2, size=size, **patches)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    ends = _ids(tokenizer, bos_token_id="<|endoftext|>", eos_token_id="<|im_end|>")
    text = {**_TEXT, **ends, "vocab_size": len(tokenizer), "rope_parameters": rope, **text}
    tower = {"depth": 3, "num_heads": 2, "spatial_merge_size": 2, **patches, **tower}
    ids = _ids(
        tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>",
    )  # fmt: skip
    model = _model(name, text_config=text, vision_config=tower, **ids)
    return model, _processor(processor, pictures, tokenizer, chat_template=_CHATML)


_QWEN_TOWER = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}


def qwen2_vl() -> tuple[Any, Any]:
    """A model and its processor."""
    return _qwen("Qwen2VL", "Qwen2VLProcessor", {}, {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2})


def qwen2_5_vl() -> tuple[Any, Any]:
    """A model and its processor: a layer of the tower sees windows of 16 x 16 pixels, two see the whole image."""
    tower = {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [0, 2]}
    return _qwen("Qwen2_5_VL", "Qwen2_5_VLProcessor", {}, tower)


def qwen3_vl() -> tuple[Any, Any]:
    """A model and its processor: two layers of the tower are read again by the decoder."""
    tower = {**_QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return _qwen("Qwen3VL", "Qwen3VLProcessor", {}, tower)


def qwen3_5() -> tuple[Any, Any]:
    """A model and its processor: two layers of linear attention and one of full attention."""
    text = {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1],
        },
    }  # fmt: skip
    return _qwen("Qwen3_5", "Qwen3VLProcessor", text, {**_QWEN_TOWER, "num_position_embeddings": 64})


def gemma3() -> tuple[Any, Any]:
    """A model and its processor: four tokens for any image, which see each other."""
    seen = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    turns = ["<eos>", "<pad>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = _tokenizer([*turns, *seen.values()], "<eos>", "<pad>", **seen)
    pictures = _part("image_processing_pil", "gemma3", "Gemma3ImageProcessorPil", size={"height": 32, "width": 32})
    text = {
        **_TEXT, "vocab_size": len(tokenizer), "sliding_window": 16, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
    }  # fmt: skip
    ids = _ids(tokenizer, **{name.replace("token", "token_index"): token for name, token in seen.items()})
    tower = {**_TOWER, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8, "vision_use_head": False}
    model = _model("Gemma3", text_config=text, vision_config=tower, mm_tokens_per_image=4, **ids)
    return model, _processor("Gemma3Processor", pictures, tokenizer, image_seq_length=4, chat_template=_GEMMA)


def gemma4() -> tuple[Any, Any]:
    """A model and its processor: one token for 8 x 8 pixels, which see each other, of 70 at most; no model of sound."""
    seen = {
        "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
        "eoa_token": "<audio|>", "audio_token": "<|audio|>",
    }  # fmt: skip
    turns = ["<eos>", "<pad>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|video|>"]
    tokenizer = _tokenizer([*turns, *seen.values()], "<eos>", "<pad>", **seen)
    sizes = {"patch_size": 4, "pooling_kernel_size": 2}
    pictures = _part("image_processing_pil", "gemma4", "Gemma4ImageProcessorPil", max_soft_tokens=70, **sizes)
    text = {
        **_TEXT, "vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer), "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 8,
        "hidden_size_per_layer_input": 4, "use_bidirectional_attention": "vision",
        **_ids(tokenizer, pad_token_id="<pad>", bos_token_id="<bos>", eos_token_id="<eos>"),
    }  # fmt: skip
    ids = _ids(
        tokenizer, boi_token_id="<|image>", eoi_token_id="<image|>", image_token_id="<|image|>",
        video_token_id="<|video|>", audio_token_id="<|audio|>",
    )  # fmt: skip
    tower = {
        **_TOWER, **sizes, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8,
        "position_embedding_size": 128,
    }  # fmt: skip
    model = _model("Gemma4", text_config=text, vision_config=tower, audio_config=None, **ids)
    template = _GEMMA.replace("<start_of_image>", "<|image|>")
    return model, _processor("Gemma4Processor", pictures, tokenizer, chat_template=template)


def _idefics(name: str, images: str, module: str) -> tuple[Any, Any]:
    """A model and its processor: four tokens for each tile of 32 x 32 pixels, and for the whole image."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    turns = ["<|im_start|>", "<end_of_utterance>", "<pad>"]
    seen = ["<fake_token_around_image>", "<image>", "<global-img>", *tiles]
    tokenizer = _tokenizer([*turns, *seen], "<end_of_utterance>", "<pad>")
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    pictures = _part("image_processing_pil", module, images, **sizes)
    pad = _ids(tokenizer, pad_token_id="<pad>")
    text = {**_TEXT, "model_type": "llama", "vocab_size": len(tokenizer), **pad}
    tower = {**_TOWER, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    ids = _ids(tokenizer, image_token_id="<image>", pad_token_id="<pad>")
    model = _model(name, text_config=text, vision_config=tower, scale_factor=2, **ids)
    return model, _processor(f"{name}Processor", pictures, tokenizer, image_seq_len=4, chat_template=_IDEFICS)


def idefics3() -> tuple[Any, Any]:
    """A model and its processor."""
    return _idefics("Idefics3", "Idefics3ImageProcessorPil", "idefics3")


def smolvlm() -> tuple[Any, Any]:
    """A model and its processor."""
    return _idefics("SmolVLM", "SmolVLMImageProcessorPil", "smolvlm")


def internvl() -> tuple[Any, Any]:
    """A model and its processor: four tokens for each of up to three tiles of 32 x 32 pixels, and for the whole."""
    seen = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    turns = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _tokenizer([*turns, *seen.values()], "<|im_end|>", "<|endoftext|>", **seen)
    size = {"height": 32, "width": 32}
    pictures = _part("image_processing_pil", "got_ocr2", "GotOcr2ImageProcessorPil", size=size, max_patches=3)
    text = {**_TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)}
    tower = {**_TOWER, "num_hidden_layers": 2, "image_size": [32, 32], "patch_size": [8, 8]}
    ids = _ids(tokenizer, image_token_id="<IMG_CONTEXT>")
    model = _model("InternVL", text_config=text, vision_config=tower, image_seq_length=4, **ids)
    template = _CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
    return model, _processor("InternVLProcessor", pictures, tokenizer, image_seq_length=4, chat_template=template)


def mistral3() -> tuple[Any, Any]:
    """A model and its processor, which needs torchvision: one token for 8 x 8 pixels, one after each row of them."""
    turns = ["<s>", "</s>", "<pad>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|im_start|>", "<|im_end|>"]
    tokenizer = _tokenizer(turns, "</s>", "<pad>")
    sizes = {"size": {"longest_edge": 64}, "patch_size": 8}
    pictures = _part("image_processing_pil", "pixtral", "PixtralImageProcessorPil", **sizes)
    text = {**_TEXT, "model_type": "mistral", "vocab_size": len(tokenizer), "sliding_window": None}
    sizes = {"num_hidden_layers": 2, "image_size": 64, "patch_size": 4, "head_dim": 8}
    tower = {**_TOWER, "model_type": "pixtral", **sizes}
    ids = _ids(tokenizer, image_token_index="[IMG]")
    model = _model("Mistral3", text_config=text, vision_config=tower, spatial_merge_size=2, **ids)
    template = _CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]")
    sizes = {"patch_size": 4, "spatial_merge_size": 2}
    return model, _processor("PixtralProcessor", pictures, tokenizer, chat_template=template, **sizes)


ENDS = ("<|im_end|>", "<end_of_turn>", "<end_of_utterance>")
"""The tokens that end a turn."""

FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    made.__name__: made
    for made in (qwen3_vl, qwen3_5, qwen2_5_vl, qwen2_vl, gemma3, gemma4, idefics3, smolvlm, internvl)
}
if is_torchvision_available():
    FAMILIES["mistral3"] = mistral3


def base(folder: Path, family: str) -> Path:
    """A checkpoint of a family in `folder`, with weights that are far enough from zero to tell images apart."""
    torch.manual_seed(0)
    model, processor = FAMILIES[family]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.1)
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    settings = ("image_seq_len", "image_seq_length", "patch_size", "spatial_merge_size")
    given = {name: value for name in settings if (value := getattr(processor, name, None)) is not None}
    (folder / "processor_config.json").write_text(json.dumps(given), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")
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
