"""The memory that rounding a model takes on the device, by the shapes of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from finetune.export.rounding.layers import TOKENS_AT_ONCE
from finetune.export.rounding.part_files import RoundedPart
from finetune.forms import FORMS

_FLOAT = torch.float32.itemsize
# Layers whose input is what others of the same module computed; others of a module share one input.
_LAST = ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "wo", "w2")


def peak_bytes(model: Any, parts: Sequence[RoundedPart], rows: torch.Size, dtype: torch.dtype) -> int:
    """Peak bytes of tensors while `rows` (rows, tokens) pass and layers are rounded, in the compute type `dtype`."""
    hidden = rows.numel() * model.config.get_text_config().hidden_size * dtype.itemsize
    beside, *others = parts
    tables = [model.get_parameter(name).numel() * dtype.itemsize for name in beside.forms]  # decoded as a whole
    return hidden + max([*tables, *(_of_part(model, part, rows, dtype, hidden) for part in others if part.forms)])


def _of_part(model: Any, part: RoundedPart, rows: torch.Size, dtype: torch.dtype, hidden: int) -> int:
    """A layer's weights beside the larger of what rounding takes and what the pass of the rounded layer takes."""
    shapes = {name: model.get_parameter(name).shape for name in part.forms}
    weights = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    together: dict[tuple[str, int], int] = {}
    joined: dict[tuple[str, int, str], int] = {}
    for name, (*count, height, columns) in shapes.items():
        path, _, last = name.removesuffix(".weight").rpartition(".")
        source = name if count or last in _LAST else path
        together[source, columns] = torch.Size(count).numel()
        matrix = source, columns, part.forms[name]
        joined[matrix] = joined.get(matrix, 0) + height * columns
    sums = sum(count * columns**2 for (_, columns), count in together.items()) * _FLOAT
    # Joined matrices in float32; three matrices while the factor is computed, or it and two more copies, and codes.
    rounding = max(
        _FLOAT * size + max(3 * _FLOAT * columns**2, _FLOAT * columns**2 + (2 * _FLOAT + 1) * size)
        for (_, columns, _), size in joined.items()
    )
    codes = sum(FORMS[part.forms[name]].codec.shapes(shape)[0].numel() for name, shape in shapes.items())
    heights = sum(shape[-2] for shape in shapes.values())
    computed = min(TOKENS_AT_ONCE, rows.numel()) * heights * dtype.itemsize
    return weights + max(sums + codes + max(rounding, computed), hidden + computed)
