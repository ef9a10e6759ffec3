"""The codec of a form: which values a weight may have, how they are stored, and how files name what is stored.

The values of a weight (..., rows, columns) are `scale * level - offset`: a code chooses one of the form's levels, and a
group of neighbouring columns shares scale and offset (`Grid`). What is stored are the fields of blocks, such as scales
in 6 bits and the factor of all of them in float16 (`BlockFields`). Any codes and fields make a legal weight; only
decoding is fixed, and equal to the bit to that of the form's own programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

BlockFields = Mapping[str, torch.Tensor]
"""What a format stores of each block beside the codes, by name, in the types in which it is stored."""

BytesAndScales = tuple[torch.Tensor, torch.Tensor]
"""The bytes of rows, and the scales that are stored beside them (without columns if the bytes hold them)."""


@dataclass(frozen=True)
class Grid:
    """The values that weights may have: `scales * level - offsets`, both in float32 (..., rows, columns / group)."""

    scales: torch.Tensor
    offsets: torch.Tensor | None = None


# -- in files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How files name the tensors of a packed weight: the `endings` of its bytes and of its scales.

    `joined` makes the scales of a `Packing` from those of the files; None where the bytes hold them. `write` gives the
    tensors, in the order of the endings, from bytes, scales and the shape of the values (rows, columns); `stated` is
    the entry in config.json, given the modules that stay in 16 bit. `zeros`: whether a scale of more than 8 bits may be
    0.
    """

    endings: tuple[str, ...]
    joined: Callable[..., torch.Tensor] | None = None
    write: Callable[[torch.Tensor, torch.Tensor, torch.Size], tuple[torch.Tensor, ...]] | None = None
    stated: Callable[[list[str]], dict[str, Any]] | None = None
    zeros: bool = False

    def written(self, codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> dict[str, torch.Tensor]:
        """The tensors of a weight by their endings."""
        assert self.write
        return dict(zip(self.endings, self.write(codes, scales, shape), strict=True))

    def scales(self, codes: torch.Tensor, *stored: torch.Tensor) -> torch.Tensor:
        """The scales of a `Packing` from the tensors of a file.

        Raises ValueError for scales that are integers, negative or not finite, and for zeros of more than 8 bits: in 8
        bits a block of small values may have one.
        """
        for ending, each in zip(self.endings[1:], stored, strict=False):
            if "scale" not in ending:
                continue
            bits = each.dtype is torch.uint8  # e8m0 or e4m3, of which 255 is NaN
            if not (bits or each.is_floating_point()):
                raise ValueError(f"its scales have the type {each.dtype}")
            values = each if bits else each.float()
            wrong = (values == 255) if bits else ~(values.isfinite() & (values >= 0))
            if not (bits or self.zeros) and each.itemsize > 1:
                wrong |= values == 0
            if wrong.any():
                raise ValueError(f"{int(wrong.sum())} of its {each.numel()} scales are not positive numbers")
        return self.joined(*stored) if self.joined else codes[..., :0]


@dataclass(frozen=True)
class Files:
    """How safetensors files hold weights in a form.

    `layouts` are those of published bases, and `states` says whether an entry on quantization in config.json is of this
    form; `methods` are the values of `quant_method` there. `left_out` gives the modules that files leave in 16 bit, as
    transformers reads them: names and regular expressions. `written` is the layout of exports, and `of_experts` that of
    experts that the model reads transposed (gpt-oss).

    `experts_alone`: published bases have experts in this form alone, whose values the model reads transposed.
    `experts_in_one`: the layout has a place for all experts of a layer in one tensor. `of_library`: transformers has a
    quantizer of its own for the form. `beside`: tensors beside a weight that are not used here.
    """

    layouts: tuple[Layout, ...] = ()
    methods: tuple[str, ...] = ()
    states: Callable[[Mapping[str, Any]], bool] = lambda given: False
    left_out: Callable[[Mapping[str, Any]], list[str]] = lambda given: list(
        given.get("modules_to_not_convert") or given.get("ignored_layers") or ()  # MiniMax writes the second
    )
    written: Layout | None = None
    of_experts: Layout | None = None
    experts_alone: bool = False
    experts_in_one: bool = False
    of_library: bool = False
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class InGguf:
    """How a GGUF file holds a matrix.

    `encode` makes its bytes there from bytes and scales (..., rows, n), unless they are the same. `factor`, if there is
    one, is that of each matrix in float32, by which products are multiplied; it raises ValueError if rows have
    different ones. `fallback`: the form that replaces this one where blocks do not divide a row.
    """

    encode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    factor: Callable[[torch.Tensor], torch.Tensor] | None = None
    fallback: str | None = None


def of_gguf(name: str) -> Files:
    """The bytes of a form of GGUF files, in the folder that is made of one."""
    return Files((Layout((f"_{name}",)),))


# -- in memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How a kernel of `kernels.decoding_kernels` reads the codes of a block: `parts` of `run` bytes.

    `order`: "single" for one code a byte, "pairs" for neighbouring columns, "apart" for runs of columns, those of upper
    bits `apart` columns after those of lower bits. Parts begin `stride` columns apart, and after `half` of them anew.
    `scales` of codes in pairs: "exponents" of two, "factors" of a row before numbers in e4m3, or "numbers".
    """

    parts: int
    run: int
    order: str = "apart"
    stride: int = 0
    apart: int = 0
    half: int = 0
    scales: str = "numbers"


@dataclass(frozen=True)
class Blocks:
    """Blocks of `columns` weights of a row in `stored` bytes, of which each `group` shares a scale.

    `scales`: numbers beside the bytes of a block, in `scale_dtype`; `row_scales`: those with which a row's begin. A
    scale is of `rows` rows. `padded`: whether the last block of a row is stored as a whole. `tile`: how a kernel reads
    them; without one, torch's operators decode.
    """

    columns: int
    group: int
    stored: int
    scales: int = 0
    scale_dtype: torch.dtype = torch.uint8
    row_scales: int = 0
    rows: int = 1
    padded: bool = True
    tile: Tile | None = None


@dataclass(frozen=True)
class OfWhole:
    """How a form is searched whose scales depend on a whole weight, which is encoded part by part.

    `begin` writes what all parts share into the scales of the weight; `search` gives the fields of a part with these.
    """

    begin: Callable[[torch.Tensor, torch.Tensor], None]
    search: Callable[[torch.Tensor, torch.Tensor], BlockFields]


@dataclass(frozen=True)
class Floats:
    """How a form whose levels are floating-point numbers rounds and decodes without a table of them.

    `to_codes` gives codes in uint8 of numbers in units of the scale, which it may overwrite. `read` writes the values
    of bytes and scales into a tensor of any floating type; a form without it has `Codec.unpack`.
    """

    to_codes: Callable[[torch.Tensor], torch.Tensor]
    read: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None


@dataclass(frozen=True)
class Codec:
    """How the values of a weight become bytes, in `blocks`.

    `levels`: the value of each code, ascending unless the form is one of `floats`. `search`: the fields for weights
    (..., rows, columns) in float32, so that the squares of errors, weighted with the `importance` of each column (None:
    all alike), are small. `grid`: what fields decode to. `pack`: bytes, and scales (without columns where the bytes
    hold them), from codes in uint8 of the weight's shape; `unpack` is its reverse, in whose place `floats` may `read`.
    """

    blocks: Blocks
    levels: tuple[float, ...]
    search: Callable[[torch.Tensor, torch.Tensor | None], BlockFields]
    grid: Callable[[BlockFields], Grid]
    pack: Callable[[torch.Tensor, BlockFields], BytesAndScales]
    unpack: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, BlockFields]] | None = None
    floats: Floats | None = None
    of_whole: OfWhole | None = None
    files: Files = Files()
    gguf: InGguf = InGguf()

    @property
    def as_operator(self) -> bool:
        """Whether converting a weight, which takes many operators, is one for torch; a forecast counts it as one."""
        return self.unpack is not None

    @property
    def _is_linear(self) -> bool:
        """Whether the levels are consecutive integers."""
        return self.levels[-1] - self.levels[0] == len(self.levels) - 1

    def shapes(self, shape: torch.Size) -> tuple[torch.Size, torch.Size]:
        """The shapes of the bytes and of the scales of a weight of this shape."""
        *others, columns = shape
        own = self.blocks
        blocks = -(-columns // own.columns)
        stored = blocks * own.stored if own.padded else columns
        scales = own.row_scales + blocks * own.scales
        rows = [*others[:-1], -(-others[-1] // own.rows)]
        return torch.Size((*others, stored)), torch.Size((*rows, scales))

    def encode(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the bytes and scales of a part of a weight, the latter begun by `of_whole` if the form has that."""
        if missing := -weight.shape[-1] % self.blocks.columns:
            weight = functional.pad(weight, (0, missing))
        weight = weight.float()
        found = self.of_whole.search(weight, scales) if self.of_whole else self.search(weight, None)
        for stored, made in zip((codes, scales), self.encoded(weight, found), strict=True):
            stored.copy_(made[..., : stored.shape[-1]])

    def encoded(self, weight: torch.Tensor, fields: BlockFields) -> BytesAndScales:
        """The bytes and scales of a weight in float32, each value rounded to the nearest that `fields` allow."""
        return self.pack(self.nearest(weight, self.grid(fields)), fields)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of bytes and scales into `out`, of any floating type."""
        if self.floats and self.floats.read:
            self.floats.read(codes, scales, out)
        else:
            assert self.unpack
            unpacked, fields = self.unpack(codes, scales)
            out.copy_(self.values(unpacked, self.grid(fields))[..., : out.shape[-1]])

    def nearest(self, weight: torch.Tensor, grid: Grid, group: int = 0) -> torch.Tensor:
        """The codes (uint8, the weight's shape) of the levels that are nearest to `weight` (float32); `group` columns
        share a scale of the grid (0: as in the form).
        """
        wanted = weight.unflatten(-1, (-1, group or self.blocks.group))
        if grid.offsets is not None:
            wanted = wanted + grid.offsets.unsqueeze(-1)
        wanted = wanted / grid.scales.unsqueeze(-1)
        if self.floats:
            return self.floats.to_codes(wanted).flatten(-2)
        wanted.nan_to_num_(0.0, 0.0, 0.0)  # a scale of 0 has one value
        if self._is_linear:
            codes = wanted.round_().clamp_(self.levels[0], self.levels[-1]).sub_(self.levels[0])
        else:
            levels = torch.tensor(self.levels, dtype=torch.float32, device=weight.device)
            codes = torch.bucketize(wanted, (levels[1:] + levels[:-1]) / 2, out_int32=True)
        return codes.to(torch.uint8).flatten(-2)

    def values(self, codes: torch.Tensor, grid: Grid, group: int = 0) -> torch.Tensor:
        """The values in float32 of codes (..., rows, columns), rounded as llama.cpp rounds them; `group` as in
        `nearest`.
        """
        if self._is_linear:
            made = codes.float().add_(self.levels[0])
        else:
            levels = torch.tensor(self.levels, dtype=torch.float32, device=codes.device)
            made = levels.index_select(0, codes.flatten().int()).view(codes.shape)
        made = made.unflatten(-1, (-1, group or self.blocks.group)).mul_(grid.scales.unsqueeze(-1))
        if grid.offsets is not None:
            made -= grid.offsets.unsqueeze(-1)
        return made.flatten(-2)
