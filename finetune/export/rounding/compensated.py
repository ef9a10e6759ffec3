"""Rounds a weight to a format of blocks so that its products with the training rows change little.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv 2210.17323),
algorithm 1: columns are rounded in order, and the error of each is made up for by those that are not rounded yet, by
the Cholesky factor of the inverse Hessian. Columns keep their order, since blocks are neighbouring columns. The fields
of a block are searched when the sweep reaches it, for the weights as they are then.

Shapes: weights (rows, columns), Hessians (columns, columns), all in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from finetune.forms.codec import BlockFields, Codec, Grid

DAMPING = 0.01
"""What is added to the diagonal of a Hessian, relative to its mean (section 3.3, step 3)."""

_COLUMNS = 128
"""Columns after which those to the right of them are corrected, with one product (section 3.3, step 2)."""


def compensated(codec: Codec, weight: torch.Tensor, hessian: torch.Tensor) -> tuple[torch.Tensor, BlockFields]:
    """Codes (uint8, the weight's shape) and fields of `weight`, for inputs x with the sum `hessian` of x x^T.

    A column that no input had is rounded by itself.
    """
    # `DAMPING` of the mean is added to the diagonal, which is that mean where no input had a column.
    damped = hessian.clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = mean if mean > 0 else 1.0
    diagonal += DAMPING * mean
    importance = diagonal.clone()
    factor = _inverse_factor(damped)
    search = _FieldSearch(codec, weight, importance)
    weight, codes = weight.clone(), torch.empty_like(weight, dtype=torch.uint8)
    width = max(_COLUMNS, codec.blocks.columns)
    for start in range(0, weight.shape[1], width):
        part, own = weight[:, start : start + width], factor[start : start + width, start : start + width]
        errors = torch.empty_like(part)
        for column, grid in enumerate(search.grids(part, start)):
            wanted = part[:, column : column + 1]
            code = codec.nearest(wanted, grid, group=1)
            codes[:, start + column] = code[:, 0]
            error = (wanted - codec.values(code, grid, group=1)) / own[column, column]
            errors[:, column] = error[:, 0]
            part[:, column + 1 :] -= error * own[column, column + 1 :]
        weight[:, start + width :] -= errors @ factor[start : start + width, start + width :]
    return codes, search.fields()


class _FieldSearch:
    """The fields of each block, for the weights as they are when the sweep reaches it.

    The fields of a form that needs the whole weight are those of the weight as it was.
    """

    def __init__(self, codec: Codec, weight: torch.Tensor, importance: torch.Tensor) -> None:
        self._codec, self._importance, self._found = codec, importance, list[BlockFields]()
        self._whole = codec.search(weight, importance) if codec.of_whole else None

    def grids(self, part: torch.Tensor, start: int) -> Iterator[Grid]:
        """The grid (rows, 1) of each column of `part`, whose first is `start`; `part` may change between two."""
        codec, blocks = self._codec, self._codec.blocks
        for first in range(0, part.shape[1], blocks.columns):
            if self._whole is None:
                block = part[:, first : first + blocks.columns].contiguous()
                important = self._importance[start + first : start + first + blocks.columns]
                self._found.append(codec.search(block, important))
                grid, before = codec.grid(self._found[-1]), 0
            else:
                grid, before = codec.grid(self._whole), start + first
            for column in range(before, before + blocks.columns):
                group = slice(column // blocks.group, column // blocks.group + 1)
                yield Grid(grid.scales[:, group], None if grid.offsets is None else grid.offsets[:, group])

    def fields(self) -> BlockFields:
        """The fields of all blocks."""
        if self._whole is not None:
            return self._whole
        return {name: torch.cat([fields[name] for fields in self._found], dim=1) for name in self._found[0]}


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper triangular U with U^T U = H^-1; `hessian` is overwritten.

    With H = R R^T for an upper triangular R, which is the lower factor of H with rows and columns reversed, U is R^-1.
    """
    lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    while failed:  # rounding of float32 made a small eigenvalue negative
        hessian.diagonal().mul_(1 + DAMPING)
        lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    inverse = torch.eye(len(lower), out=hessian)
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    return inverse.flip(0, 1)
