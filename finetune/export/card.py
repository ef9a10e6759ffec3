"""The model card of an export: how it was made, and what was measured."""

from __future__ import annotations

from typing import Any

from finetune.config import Config, named


def model_card(config: Config, record: dict[str, Any], written_as: str) -> str:
    """README.md of an exported model, in the hub's format; `written_as` is the help of its format."""
    adapter, training = config.adapter, config.training
    base = f"base_model: {config.model.name}\n" if not config.model.name.startswith("builtin:") else ""
    return f"""---
{base}library_name: transformers
pipeline_tag: text-generation
---

# {config.model.name}, fine-tuned

A rank-{adapter.rank} LoRA adapter (alpha {adapter.alpha:g}, base in {config.quantization.kind}) trained on
`{named(config.data.train)}` with learning rate {training.learning_rate:g} and batch size {training.batch_size}, merged
in 16 bit, and written as {written_as}.

Its logits, computed from the written files, were compared with {record["compared_with"]} on
{record["rows"]} held-out rows ({record["tokens"]} tokens): they differ by {record["error"]:.3%} (bound
{record["bound"]:.3%}, the adapter's own effect {record["effect"]:.3%}), and agree on the most likely next token at
{record["agreement"]:.2%} of positions. `merge.json` has the figures and the hash of the base.
"""
