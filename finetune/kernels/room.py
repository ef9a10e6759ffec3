"""Rows of results with room beside them, for further columns of the product that takes them."""

from __future__ import annotations

from torch import Tensor

# Kernels read and write 16 bytes at once where rows begin at multiples of this; cuBLAS wants half of it.
_PIECE = 16


def with_room(like: Tensor, room: int) -> Tensor:
    """An empty contiguous tensor (..., width + room), rounded up so that its rows begin where kernels are fastest."""
    width = like.shape[-1]
    if room:
        width = -(-(width + room) // _PIECE) * _PIECE
    return like.new_empty((*like.shape[:-1], width))
