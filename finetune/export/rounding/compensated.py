"""Rounds a weight to a format of blocks so that its products with the training rows change little.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv 2210.17323),
algorithm 1: columns are rounded in order, and the error of each is made up for by those that are not rounded yet, by
the Cholesky factor of the inverse Hessian. Columns keep their order, since blocks are neighbouring columns. The fields
of a block are searched when the sweep reaches it, for the weights as they are then.

Shapes: weights (rows, columns), Hessians (columns, columns), all in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from finetune.model.structure.block_formats import BlockFormat, Fields, Grid, nearest, values

DAMPING = 0.01
"""What is added to the diagonal of a Hessian, relative to its mean (section 3.3, step 3)."""

_COLUMNS = 128
"""Columns after which those to the right of them are corrected, with one product (section 3.3, step 2)."""


def compensated(form: BlockFormat, weight: torch.Tensor, hessian: torch.Tensor) -> tuple[torch.Tensor, Fields]:
    """Codes (uint8, the weight's shape) and fields of `weight`, for inputs x with the sum `hessian` of x x^T.

    A column that no input had is rounded by itself.
    """
    damped = _damped(hessian)
    importance = damped.diagonal().clone()
    factor = _inverse_factor(damped)
    weight, codes, found = weight.clone(), torch.empty_like(weight, dtype=torch.uint8), list[Fields]()
    width = max(_COLUMNS, form.columns)
    for start in range(0, weight.shape[1], width):
        part, factor_of_part = weight[:, start : start + width], factor[start : start + width]
        errors = torch.empty_like(part)
        for first in range(0, part.shape[1], form.columns):
            block = slice(first, first + form.columns)
            fields = form.search(part[:, block].contiguous(), importance[start:][block])
            found.append(fields)
            for column, grid in zip(range(first, first + form.columns), _of_columns(form, fields), strict=True):
                wanted, row = part[:, column : column + 1], factor_of_part[column, start : start + width]
                single = replace(form, group=1)
                code = nearest(single, wanted, grid)
                codes[:, start + column] = code[:, 0]
                error = (wanted - values(single, code, grid)) / row[column]
                errors[:, column] = error[:, 0]
                part[:, column + 1 :] -= error * row[column + 1 :]
        weight[:, start + width :] -= errors @ factor_of_part[:, start + width :]
    return codes, {name: torch.cat([fields[name] for fields in found], dim=1) for name in found[0]}


def _damped(hessian: torch.Tensor) -> torch.Tensor:
    """A copy with `DAMPING` of the mean on the diagonal, and that mean where no input had a column."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = mean if mean > 0 else 1.0
    diagonal += DAMPING * mean
    return hessian


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


def _of_columns(form: BlockFormat, fields: Fields) -> Iterator[Grid]:
    """The grid (rows, 1) of each column of a block."""
    grid = form.grid(fields)
    for column in range(form.columns):
        group = slice(column // form.group, column // form.group + 1)
        yield Grid(grid.scales[:, group], None if grid.offsets is None else grid.offsets[:, group])
