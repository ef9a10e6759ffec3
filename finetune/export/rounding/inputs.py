"""Sums over the inputs of a layer's weights: the Hessians of the squared errors of their products.

A product is recognised by the address of its weight, whichever module computes it. So are those of single experts,
whose weights share one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Functions of an input (..., columns) and a weight.
_PRODUCTS: set[Any] = {
    functional.linear, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__,
}  # fmt: skip

Key = tuple[str, int]
"""The name of a weight, and the number of an expert in it (0 for a matrix)."""


class InputSums(TorchFunctionMode):
    """In its block, sums x^T x (columns, columns) in float32 over the inputs x (tokens, columns) of each weight.

    `weights`: (rows, columns) or (experts, rows, columns) by name, the last two exchanged where the model multiplies
    `x @ weight`. Weights that share an input share its sum.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tokens: dict[Key, int] = {}
        self.sums: dict[Key, torch.Tensor] = {}
        """By the keys that `source` returns."""
        self._shared: dict[Key, Key] = {}
        self._keys: dict[int, Key] = {}
        for name, weight in weights.items():
            for number, matrix in enumerate(weight.unbind() if weight.dim() == 3 else [weight]):
                self._keys[matrix.data_ptr()] = name, number
        self._last: tuple[torch.Tensor, Key] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[1] if function in _PRODUCTS and len(args) > 1 else None
        if weight is not None and weight.dim() == 2 and (key := self._keys.get(weight.data_ptr())):
            self.add(key, args[0])
        return function(*args, **(kwargs or {}))

    def source(self, key: Key) -> Key | None:
        """The key of the sum for a weight, which others may share; None if it had no input."""
        source = self._shared.get(key, key)
        return source if source in self.sums else None

    def add(self, key: Key, x: torch.Tensor) -> None:
        """Add an input (..., columns) of a weight."""
        self.tokens[key] = self.tokens.get(key, 0) + x.shape[:-1].numel()
        if self._last is not None and self._last[0] is x:
            self._shared[key] = self.source(self._last[1]) or key
            return
        self._last = x, key
        rows = x.flatten(0, -2).float()
        if key in self.sums:
            self.sums[key].addmm_(rows.T, rows)
        else:
            self.sums[key] = rows.T @ rows

    def release(self) -> None:
        """Forget the last input."""
        self._last = None
