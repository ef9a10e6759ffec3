"""Weights that training moves between the values of a block format: positions between its levels, in fixed point.

The scales and offsets of a weight W stay as the format's search found them for the base. Kept of each weight beside
them is its position (W + offset) / scale between the levels, in 8 bits, or in 16 for formats of more than 64 levels, so
that two bits or more remain below a level (LR-QAT, arXiv 2406.06385, section 3.2). An update kappa B A moves positions,
and the forward pass computes with the values of the nearest levels:

    q = clamp(floor(position + kappa B A / scale), 0, levels - 1),    W^ = scale * level(q) - offset

with positions counted from half a level below the lowest. Codes stand for the middle of their intervals, so without an
update q is the level nearest to W. Formats whose levels lie at other distances take the nearest level.

Shapes: weights are (..., rows, columns), A is (r, columns) and B (rows, r); of experts all have one dimension more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from finetune.model.structure import float_blocks
from finetune.model.structure.block_fields import BlockFields, Grid, is_linear
from finetune.model.structure.block_formats import BLOCK_FORMATS, BlockFormat

Update = tuple[torch.Tensor, torch.Tensor, float]
"""A (..., r, columns) and B (..., rows, r) in float32, and kappa."""

_PREFIX = "exact_"
_MOST_IN_A_BYTE = 64
"""Levels of a format whose positions fit in 8 bits."""


@dataclass(frozen=True)
class FixedPoint:
    """How positions between the levels of a format are stored: `bytes_each`, and `step` of a code in levels.

    `name` is that of the format, `low` the level at position 0; `even`: whether the levels are consecutive integers.
    """

    name: str
    form: BlockFormat
    bytes_each: int
    low: float
    step: float
    even: bool

    def shapes(self, shape: torch.Size) -> tuple[torch.Size, torch.Size]:
        """The shapes of the codes and of the fields' bytes of a weight."""
        *others, columns = shape
        fields = sum(dtype.itemsize * prod(each) for dtype, each in _fields(self.form, columns).values())
        return torch.Size((*others, columns * self.bytes_each)), torch.Size((*others, fields))

    def encode(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of `weight`, and the bytes of the fields that the format's search finds for it."""
        weight = weight.float()
        self.encode_with(self.form.search(weight, None), weight, codes, scales)

    def encode_with(self, fields: BlockFields, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of `weight`, in float32, and the bytes of its `fields`."""
        parts = [fields[name].contiguous().flatten(weight.dim() - 1) for name in _fields(self.form, weight.shape[-1])]
        scales.copy_(torch.cat([part.view(torch.uint8) for part in parts], dim=-1))
        code = self._code(weight, self.form.grid(fields)).flatten(-2)
        if self.bytes_each == 1:
            codes.copy_(code)
        else:
            codes.view(torch.int16).copy_(code - 2**15)

    def nearest(self, weight: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The numbers of the levels nearest to the positions of `weight` (rows, columns), which close to the middle of
        two uneven levels may not be the nearest to `weight` itself.
        """
        return self._level(self._code(weight, grid)).to(torch.uint8).flatten(-2)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of the levels nearest to W (..., rows, columns) into `out`, of any floating type."""
        self._values(codes, self.grid(scales, out.shape[-1]), out)

    def snap_(
        self, codes: torch.Tensor, grid: Grid, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, kappa: float
    ) -> None:
        """Write W^ (..., rows, columns) into `out`, of any floating type; A and B are in float32."""
        for codes_part, grid_part, a_part, b_part, out_part in _parts(codes, grid, a, b, out):
            self._values(codes_part, grid_part, out_part, shift_of(grid_part, a_part, b_part, kappa))

    def as_stored(
        self, codes: torch.Tensor, scales: torch.Tensor, update: Update | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes and scales of the values after an update, as the format stores them."""
        fields = self.fields(scales, codes.shape[-1] // self.bytes_each)
        grid = self.form.grid(fields)
        if update is None:
            return self.form.pack(self._nearest(codes).to(torch.uint8).flatten(-2), fields)
        a, b, kappa = update
        nearest = [
            self._nearest(code, shift_of(own, down, up, kappa)).to(torch.uint8).flatten(-2)
            for code, own, down, up in _parts(codes, grid, a, b)
        ]
        return self.form.pack(torch.cat(nearest).view(*codes.shape[:-1], -1), fields)

    def grid(self, scales: torch.Tensor, columns: int) -> Grid:
        """The values that a weight may have, from the bytes of its fields (..., rows, bytes)."""
        return self.form.grid(self.fields(scales, columns))

    def fields(self, scales: torch.Tensor, columns: int) -> BlockFields:
        """The format's fields from their bytes (..., rows, bytes)."""
        fields, start = dict[str, torch.Tensor](), 0
        for name, (dtype, shape) in _fields(self.form, columns).items():
            end = start + dtype.itemsize * prod(shape)
            fields[name] = scales[..., start:end].contiguous().view(dtype).unflatten(-1, shape)
            start = end
        return fields

    def _values(
        self, codes: torch.Tensor, grid: Grid, out: torch.Tensor, shift: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        level = self._nearest(codes, shift)
        if self.even:
            level.add_(self.form.levels[0])
        else:
            levels = torch.tensor(self.form.levels, dtype=torch.float32, device=codes.device)
            level = levels.index_select(0, level.flatten().int()).view(level.shape)
        level.mul_(grid.scales.unsqueeze(-1))
        if grid.offsets is not None:
            level.sub_(grid.offsets.unsqueeze(-1))
        out.copy_(level.flatten(-2))

    def _code(self, weight: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The codes of the positions of `weight`, as floats (..., rows, groups, group)."""
        position = weight.unflatten(-1, (grid.scales.shape[-1], -1))
        if grid.offsets is not None:
            position = position + grid.offsets.unsqueeze(-1)
        position = (position / grid.scales.unsqueeze(-1)).nan_to_num_(0.0, 0.0, 0.0)  # a scale of 0 has one value
        return position.sub_(self.low).div_(self.step).floor_().clamp_(0, 256**self.bytes_each - 1)

    def _nearest(self, codes: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """The numbers of the nearest levels, as floats (..., rows, groups, group)."""
        code = codes.float() if self.bytes_each == 1 else codes.view(torch.int16).float().add_(2**15)
        return self._level(code.unflatten(-1, (-1, self.form.group)), shift)

    def _level(self, code: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """The numbers of the levels nearest to the positions of codes, as floats; `code` is overwritten."""
        position = code.add_(0.5).mul_(self.step)
        if shift is not None:
            position.add_(shift)
        if self.even:
            return position.floor_().clamp_(0, len(self.form.levels) - 1)
        levels = torch.tensor(self.form.levels, dtype=torch.float32, device=code.device)
        return torch.bucketize(position.add_(self.low), (levels[1:] + levels[:-1]) / 2, right=True).float()


def shift_of(grid: Grid, a: torch.Tensor, b: torch.Tensor, kappa: float) -> torch.Tensor:
    """kappa B A / scale (rows, groups, group): by how much an update moves positions; 0 where the scale is."""
    # A batch of one, because selective checkpointing would keep a plain product of matrices (`recompute.keeping`).
    product = torch.bmm((b * kappa).unsqueeze(0), a.unsqueeze(0)).squeeze(0)
    inverse = grid.scales.reciprocal().masked_fill_(grid.scales == 0, 0.0)
    return product.unflatten(-1, (inverse.shape[-1], -1)).mul_(inverse.unsqueeze(-1))


def of(weight: Any) -> FixedPoint | None:
    """How the positions of a packed parameter are stored; None if it has none."""
    how = getattr(weight, "packing", None)
    return None if how is None else POSITIONS.get(how.form)


@torch.no_grad()
def rounded(weight: Any, update: Update, dtype: torch.dtype) -> torch.Tensor:
    """W^ (..., rows, columns) in `dtype` of a packed parameter after an update, whose factors may be of any type."""
    how, positions = weight.packing, of(weight)
    assert positions is not None
    out = torch.empty(how.shape, dtype=dtype, device=weight.device)
    a, b, kappa = update
    positions.snap_(weight.data, positions.grid(how.scales, how.shape[-1]), out, a.float(), b.float(), kappa)
    return out


def _positions(name: str, form: BlockFormat) -> FixedPoint:
    levels = form.levels
    low, high = levels[0] - (levels[1] - levels[0]) / 2, levels[-1] + (levels[-1] - levels[-2]) / 2
    bytes_each = 1 if len(levels) <= _MOST_IN_A_BYTE else 2
    return FixedPoint(name, form, bytes_each, low, (high - low) / 256**bytes_each, is_linear(levels))


# Weights whose values are made at a time, so that intermediate results stay small beside them.
_PART = 2**24


def _parts(
    codes: torch.Tensor, grid: Grid, a: torch.Tensor, b: torch.Tensor, *out: torch.Tensor
) -> Iterator[tuple[Any, ...]]:
    """Some rows of codes, grid, B and `out` with the A of these rows, of one expert after another."""
    if codes.dim() == 3:
        offsets: Any = [None] * len(codes) if grid.offsets is None else grid.offsets
        for code, scales, offset, *tensors in zip(codes, grid.scales, offsets, a, b, *out, strict=True):
            yield from _parts(code, Grid(scales, offset), *tensors)
        return
    each = max(_PART // a.shape[1], 1)
    for start in range(0, len(codes), each):
        own = slice(start, start + each)
        offsets = None if grid.offsets is None else grid.offsets[own]
        yield codes[own], Grid(grid.scales[own], offsets), a, b[own], *(tensor[own] for tensor in out)


# Training has a weight of a part of the rows, or alone: NVFP4's factor is that of all (`search_shared_nvfp4`).
_HELD = {**BLOCK_FORMATS, "nvfp4": replace(BLOCK_FORMATS["nvfp4"], search=float_blocks.search_shared_nvfp4)}

POSITIONS: Mapping[str, FixedPoint] = {
    f"{_PREFIX}{name}": _positions(name, form)
    for name, form in _HELD.items()
    if is_linear(form.levels) or len(form.levels) <= _MOST_IN_A_BYTE
}
"""By the name that `packed.FORMS` has for weights stored so. Not of FP8, whose levels are as close as positions."""


def held(name: str, *, exact: bool = True) -> str:
    """The name in training of a form, or of a kind of mixed forms, whose positions are held where that is `exact`."""
    return f"{_PREFIX}{name}" if exact else name


def served(name: str) -> str:
    """The reverse of `held`."""
    return name.removeprefix(_PREFIX)


@functools.cache
def _fields(form: BlockFormat, columns: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each of the format's fields for a row of `columns` weights."""
    fields = form.search(torch.zeros(1, columns), None)
    return {name: (field.dtype, tuple(field.shape[1:])) for name, field in fields.items()}
