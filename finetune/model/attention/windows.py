"""Sliding windows: a query sees only the last `window` tokens of its row, itself included.

transformers masks the other keys, with a byte for each pair of tokens, and a number once SDPA has converted it. Here a
long row is taken in blocks of queries, each with the keys that its queries see. The masks of all blocks are slices of
one band (1, 1, BLOCK, window + BLOCK), which is passed as the mask to each layer's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from finetune.model.source import catalog

BLOCK = 1024
"""Queries of a block: few enough that a window of as many tokens is at most computed twice over."""


def of(config: Any) -> int | None:
    """The sliding window, in tokens, of a model's layers, the largest if they differ; None without one."""
    if not getattr(config.get_text_config(), "use_sliding_window", True):
        return None
    return max((window for window in catalog.values(config, "sliding_window") if window), default=None)


def band(window: int, device: Any) -> Tensor:
    """A boolean mask (1, 1, BLOCK, window + BLOCK): which keys, of the `window` tokens before a block and its own, its
    queries see.

    No query sees the first key. It is included so that rows of the mask are aligned, and its width gives the window.
    """
    return masking_utils.sdpa_mask(
        1, BLOCK, window + BLOCK, q_offset=window, device=device, allow_is_causal_skip=False,
        mask_function=masking_utils.sliding_window_causal_mask_function(window),
    )  # fmt: skip


def in_band(mask: Tensor | None, query: Tensor, key: Tensor) -> int | None:
    """The window, if `mask` is a band and not a mask of these queries and keys (rows, heads, tokens, head_dim)."""
    if mask is None or mask.shape[-2:] == (query.shape[2], key.shape[2]) or mask.shape[-2] != BLOCK:
        return None
    return mask.shape[-1] - BLOCK


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to be added to attention scores."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def attend(attention: Callable[..., Any], mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
    """The result of `attention(query, key, value, mask)` for each block of queries (rows, heads, tokens, head_dim).

    `mask` is a band as numbers: SDPA would keep the numbers that it makes of each boolean slice for the backward pass.
    """
    window = mask.shape[-1] - BLOCK
    before = -(-window // BLOCK)
    keys, values = key.split(BLOCK, 2), value.split(BLOCK, 2)
    for number, queries in enumerate(query.split(BLOCK, 2)):
        near = slice(max(0, number - before), number + 1)
        # Joined from parts of one split, whose gradients are joined once; a slice's would each be as long as the row.
        seen = min(window, number * BLOCK) + queries.shape[2]
        parts = (torch.cat(each[near], 2)[:, :, -seen:] for each in (keys, values))
        end = window + queries.shape[2]
        yield attention(queries, *parts, mask[:, :, : queries.shape[2], end - seen : end])[0]
