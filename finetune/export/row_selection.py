"""Which rows of a packed weight a tensor of a file has, found by passing row numbers through the code that makes the
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from finetune.errors import ConfigError


def chosen(
    name: str, shape: torch.Size, store: Callable[[torch.Tensor], Mapping[str, torch.Tensor]], program: str, *,
    transposed: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The numbers of the rows (..., rows) in each tensor that `store` makes of a weight, counted over all matrices.

    `shape` is the weight's in the model; with `transposed`, rows are its last dimension. Raises ConfigError if `store`
    does more than choose rows, since blocks of packed weights lie within rows.
    """
    *others, rows, columns = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    number = torch.arange(rows * torch.Size(others).numel(), dtype=torch.int32).view(*others, rows, 1)
    numbers, places = number.expand(*others, rows, columns), torch.arange(columns).expand(*others, rows, columns)
    made, placed = (store(each.mT if transposed else each) for each in (numbers, places))
    found = {}
    for part, each in made.items():
        if each is not numbers:
            whole = each.dtype is number.dtype and each.shape[-1:] == (columns,)
            if not whole or (each != each[..., :1]).any() or (placed[part] != torch.arange(columns)).any():
                raise ConfigError(
                    f"{program} stores other columns or values of `{name}` than the model has, so its packed bytes "
                    "cannot be kept; export `merged` instead"
                )
        found[part] = each[..., 0].long()
    return found


def bytes_of(stored: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The rows of `stored` (..., rows, bytes) with these numbers (None: all), on the CPU."""
    if rows is None or stored.numel() == 0:
        return stored.cpu()
    every = stored.reshape(-1, stored.shape[-1])
    return every[rows.to(every.device)].cpu()
