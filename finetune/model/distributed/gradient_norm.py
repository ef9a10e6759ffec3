"""The norm of all gradients together, and clipping to it, accurate on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def clip(weights: Sequence[nn.Parameter], max_norm: float, device_type: str | None = None) -> Tensor:
    """Scale the gradients of `weights` to a norm of at most `max_norm`; return the norm before, () in float32.

    `device_type` is the one that a trace stands for, whose gradients are on a CPU.
    """
    norm = total([weight.grad for weight in weights if weight.grad is not None], device_type).float()
    torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm


def total(gradients: Sequence[Tensor], device_type: str | None = None) -> Tensor:
    """The norm of all gradients together; on a CPU in float64.

    torch 2.13 adds up a tensor's squares on a CPU in float32, and is off by 1.4e-3 for 24 million of them. So each row
    has its own sum, and the rows are added in float64. Ranks that hold shards of rows get the same as one process.
    """
    if not gradients or (device_type or gradients[0].device.type) != "cpu":  # a GPU adds in a tree
        return torch.nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack([_norm_by_rows(gradient) for gradient in gradients]))


def _norm_by_rows(gradient: Tensor) -> Tensor:
    """The norm of a tensor of any shape, in float64; only one in 16 bit, whose norms have as few digits, is copied."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    parts = torch.atleast_1d(gradient).split(_LONGEST_SUM, dim=-1)
    rows = torch.stack([torch.linalg.vector_norm(part, dim=-1, dtype=dtype) for part in parts])
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


_LONGEST_SUM = 2**14
"""Numbers whose norm is exact to 1e-7 if their squares are added in float32 one after the other."""
