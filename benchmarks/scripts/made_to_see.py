"""Makes a base that sees, an Idefics 3 of random weights, and rows with drawn images, for benchmarks/beside_images.py.

    python benchmarks/scripts/made_to_see.py --folder /tmp/made --rows 320

The text of the rows is the built-in one; each asks about a picture of coloured boxes, from 96 x 96 to 160 x 160 pixels.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from finetune.data import sources
from finetune.model.source.locate import BUILTIN_BASE, locate

TILE, PATCH, JOINED = 64, 8, 2
"""Pixels to a side of a tile and of a patch, and patches to a side of a token."""
CHARACTERS = 250
"""Of a row's question and answer at most: none is cut or dropped on either side."""

TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' -%}{%- generation -%}"
    "{{- message.content if message.content is string else message.content[0].text }}<|im_end|>{%- endgeneration -%}"
    "{%- elif message.content is string -%}{{- message.content }}<|im_end|>"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<image>{%- else -%}{{- part.text }}{%- endif -%}"
    "{%- endfor -%}<|im_end|>{%- endif -%}{{- '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def base(folder: Path) -> None:
    """Save the base with its processor."""
    tokenizer = AutoTokenizer.from_pretrained(locate(BUILTIN_BASE))
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    seen = ["<image>", "<fake_token_around_image>", "<global-img>", *tiles]
    tokenizer.add_special_tokens({"additional_special_tokens": seen})
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    tokens = (TILE // PATCH // JOINED) ** 2
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=tokens, chat_template=TEMPLATE)
    torch.manual_seed(0)
    config = Idefics3Config(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 768,
            "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
            "max_position_embeddings": 1024, "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4, "num_attention_heads": 6,
            "image_size": TILE, "patch_size": PATCH,
        },
        scale_factor=JOINED, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def picture(file: Path, drawn: random.Random) -> None:
    """Save a picture of coloured boxes."""
    image = Image.new("RGB", (drawn.randrange(96, 161), drawn.randrange(96, 161)), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(8):
        left, top = drawn.randrange(image.width - 20), drawn.randrange(image.height - 20)
        colour = (drawn.randrange(256), drawn.randrange(256), drawn.randrange(256))
        draw.rectangle((left, top, left + drawn.randrange(4, 20), top + drawn.randrange(4, 20)), fill=colour)
    image.save(file, quality=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--rows", required=True, type=int)
    options = parser.parse_args()
    base(options.folder / "base")
    turns = [[turn["content"] for turn in row.fields["messages"]] for row in sources.rows("builtin:python_docs")]
    short = [(question, answer) for question, answer in turns if len(question) + len(answer) <= CHARACTERS]
    drawn = random.Random(0)
    lines = []
    for number, (question, answer) in enumerate(short[: options.rows]):
        file = options.folder / f"{number}.jpg"
        picture(file, drawn)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages, "images": [str(file)]}) + "\n")
    assert len(lines) == options.rows
    (options.folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
