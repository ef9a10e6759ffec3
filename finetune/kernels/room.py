"""Room: empty columns beside the rows of a tensor, for the rank-r product of the layers that take it: U, or S of a
gradient.

A norm or an activation writes its output (n, H) into the first columns of a wider block, and `lora.products` writes U
(n, R) right beside it, so that one product of the block with [W | B] gives the layers' output:

    [ output: H columns | room, of which U takes R ]

What a norm returns reaches the layers through the model's own code or autograd, as a plain tensor. An attribute of it
says how many columns stand beside it. The first block of layers that asks takes them, and a second one finds none.
"""

from __future__ import annotations

from torch import Tensor

# Kernels read and write 16 bytes at once where rows begin at multiples of this; cuBLAS wants half of it.
_ALIGNMENT = 16

_COLUMNS = "columns_of_room"


def with_room(like: Tensor, columns: int) -> Tensor:
    """An empty contiguous tensor (..., width + columns), widened so that its rows begin where kernels are fastest."""
    width = like.shape[-1]
    if columns:
        width = -(-(width + columns) // _ALIGNMENT) * _ALIGNMENT
    return like.new_empty((*like.shape[:-1], width))


def narrowed(wide: Tensor, width: int) -> Tensor:
    """The first `width` columns of `wide` (..., width and room), with the rest as their room."""
    if wide.shape[-1] == width:
        return wide
    narrow = wide[..., :width].data  # autograd must not see a view of the rest
    setattr(narrow, _COLUMNS, wide.shape[-1] - width)
    return narrow


def columns_beside(x: Tensor) -> int:
    """The columns of room beside `x`: 0 if it has none, or if they are taken."""
    return int(getattr(x, _COLUMNS, 0))


def take_room(x: Tensor) -> Tensor | None:
    """`x` (..., H) and its room as one tensor (n, H and room), for one user only; None if there is no room."""
    columns = vars(x).pop(_COLUMNS, 0)
    if not columns:
        return None
    return x.data.as_strided((x.numel() // x.shape[-1], x.shape[-1] + columns), (x.stride(-2), 1))
