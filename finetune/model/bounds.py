"""Limits of a base model: token ids below its vocabulary size, and rows no longer than its positions."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from finetune.config import DataSection, ModelSection
from finetune.errors import ArtifactError, ConfigError
from finetune.model.build import weightless
from finetune.model.source.tokenizer import new_rows

# Rotary scaling types that extend the context beyond `max_position_embeddings`; for others (llama3, longrope) that
# value already includes the scaling.
_LENGTHENS = ("linear", "dynamic", "yarn")


def vocabulary(architecture: Any) -> int | None:
    """Rows of the embedding, possibly more than the tokenizer's tokens; None if the config does not say."""
    size = getattr(architecture.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def check_tokenizer(tokenizer: Any, architecture: Any, section: ModelSection) -> None:
    """Raise ArtifactError for a tokenizer with ids for which the base has no embedding.

    Added tokens are ignored: some checkpoints list more than they were trained with, such as Gemma 3 1B an image token.
    Whether a row uses one is checked on the rows.
    """
    size = vocabulary(architecture)
    if size is None:
        return
    ends = [getattr(tokenizer, f"{kind}_token_id") for kind in ("eos", "pad")]
    largest = max(tokenizer.vocab_size - 1, *(end for end in ends if end is not None))
    if largest >= size:
        raise ArtifactError(
            f"the tokenizer of `{section.tokenizer or section.name}` has token ids up to {largest}, but "
            f"`{section.name}` has embeddings for {size} tokens; set `model.tokenizer` to the one the base was trained "
            "with"
        )


def positions(architecture: Any) -> int | None:
    """The longest row, in tokens, that the base was made for, including rotary scaling; None if unbounded."""
    text = architecture.get_text_config()
    count = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    if not isinstance(count, int) or count <= 0:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    factor = rope.get("factor")
    if rope.get("rope_type") in _LENGTHENS and isinstance(factor, (int, float)) and math.isfinite(factor):
        return max(count, int(factor * (rope.get("original_max_position_embeddings") or count)))
    return count


def new_tokens(model: ModelSection, data: DataSection, architecture: Any) -> tuple[dict[str, Any], str]:
    """The changes that `data.new_tokens` make: their rows, and a `model.vocabulary` raised if need be; and a note."""
    rows, size = new_rows(model, data), vocabulary(architecture)
    if size is None:
        raise ConfigError(f"`data.new_tokens`: the config of {model.name} has no vocabulary size; remove them")
    largest = 1 + max(row[0] for row in rows)
    changes: dict[str, Any] = {"adapter.new_rows": rows}
    if largest > size:
        if hasattr(architecture.get_text_config(), "vocab_size_per_layer_input"):  # Gemma 3n and 4
            raise ConfigError(
                f"`data.new_tokens`: {model.name} has a second embedding for each layer, to which no rows can "
                "be added; remove them, or spell them in known tokens"
            )
        changes["model.vocabulary"] = largest
    note = (
        f"data.new_tokens: {len(rows)} rows of the embedding and the head are trained, each from the mean of the "
        "tokens that spelled it; as the head is trained, the loss is not fused"
    )
    return changes, note


def within_positions(model: ModelSection, data: DataSection, architecture: Any) -> tuple[dict[str, Any], str | None]:
    """The change of `data.max_length` to what the base allows, and a one-line note if there is something to say.

    A default `data.max_length` is lowered to the base's positions. An explicit one above them raises ConfigError if
    position embeddings are a table, and is kept if positions are computed.
    """
    name, length = model.name, data.max_length
    known = positions(architecture)
    if known is None or length <= known:
        return {}, None
    if "max_length" not in data.model_fields_set:
        return {
            "data.max_length": known
        }, f"data.max_length: lowered from {length} to {known}, the positions of `{name}`"
    text = architecture.get_text_config()
    computes_positions = getattr(text, "rope_parameters", None) or getattr(text, "alibi", False)
    if not computes_positions and table_size(weightless(model, architecture)) is not None:
        raise ConfigError(
            f"`data.max_length`: {length} is more than the {known} positions of `{name}`; set it to {known}"
        )
    return {}, (
        f"`data.max_length` {length} is above the {known} positions that `{name}` was made for: quality may "
        "drop on longer rows"
    )


def table_size(model: Any) -> int | None:
    """Size of the position table of `model`, beyond which a row raises IndexError; None if positions are computed."""
    known = positions(model.config)
    if known is None:
        return None
    words = model.get_input_embeddings()
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and module is not words]
    tables += [buffer for buffer in model.buffers() if buffer.ndim == 2]
    # OPT and BART have two rows more than positions; MPT builds its table of distances in each forward pass.
    if model.config.model_type == "mpt" or any(known <= len(table) <= known + 2 for table in tables):
        return known
    return None
