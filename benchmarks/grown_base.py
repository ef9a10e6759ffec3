"""A base of 125M weights that has learnt something, made in minutes on a CPU: grown from the built-in one.

The built-in base is 192 wide and has 4 layers. Of each channel, head and unit of an MLP there are here several copies,
and of each layer three, each of which adds a third of what that layer adds. A product sums over the copies of its
input, so each copy of a weight is its share and a random part, and the random parts of the copies sum to zero: the
grown model computes nearly what the built-in one computes (Chen et al., Net2Net, arXiv 1511.05641, section 2). It is
then trained on the docstrings that the built-in base was trained on, after which copies differ.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import harness
import torch
from transformers import AutoModelForCausalLM

from finetune.config import ModelSection
from finetune.model.source.locate import BUILTIN_BASE, locate
from finetune.model.source.tokenizer import load_tokenizer

WIDTH, LAYERS, HEADS, UNITS = 4, 12, 4, 3840
"""Copies of each channel, layers, copies of each head, and units of an MLP: 127M weights."""
STEPS, ROWS, TOKENS, RATE = 60, 4, 128, 3e-4


def write(folder: Path, steps: int = STEPS) -> None:
    """Write the base to `folder`."""
    torch.manual_seed(0)
    model = grown(AutoModelForCausalLM.from_pretrained(locate(BUILTIN_BASE), dtype=torch.float32))
    train(model, load_tokenizer(ModelSection(name=BUILTIN_BASE)), steps)
    model.to(torch.bfloat16).save_pretrained(str(folder))
    for file in Path(locate(BUILTIN_BASE)).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)


def grown(small: Any) -> Any:
    """The grown copy of `small`, before it is trained."""
    config = type(small.config).from_dict(small.config.to_dict())
    config.hidden_size *= WIDTH
    config.num_attention_heads *= HEADS
    config.num_key_value_heads *= HEADS
    config.intermediate_size, config.num_hidden_layers = UNITS, LAYERS
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights, layers = small.state_dict(), small.config.num_hidden_layers
    with torch.no_grad():
        for name, weight in model.named_parameters():
            parts = name.split(".")
            if "layers" in parts:
                place = parts.index("layers") + 1
                parts[place] = str(int(parts[place]) * layers // LAYERS)
            weight.copy_(_grown(weights[".".join(parts)], weight))
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(layers / LAYERS)
        # The head is the embedding, whose products are of all copies of a channel.
        model.model.norm.weight.div_(WIDTH)
    return model


def _grown(small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Copies of `small` in the shape of `large`, (channels,) or (rows, columns); a table of tokens keeps its rows."""
    if small.dim() == 1:
        return small.repeat(len(large) // len(small))
    rows, columns = (torch.arange(new) % old for new, old in zip(large.shape, small.shape, strict=True))
    if len(small) == len(large):
        return small[:, columns]
    copies = columns.bincount()
    share = small[rows][:, columns] / copies[columns]
    noise = torch.randn(large.shape) * share.square().mean().sqrt()
    mean = torch.zeros(len(large), small.shape[1]).index_add_(1, columns, noise) / copies
    return share + noise - mean[:, columns]


def train(model: Any, tokenizer: Any, steps: int) -> None:
    """Train all weights on docstrings."""
    text = "\n\n".join(harness.documents()["train"])[: 40 * steps * ROWS * TOKENS]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10, (steps - step) / 20)
        starts = torch.randint(0, len(ids) - TOKENS, (ROWS,))
        batch = torch.stack([ids[start : start + TOKENS] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
