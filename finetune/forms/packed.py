"""Frozen weights in the bytes that models are published and served in, on every device.

A packed parameter holds bytes, and its `Packing` how they become values. A layer decodes its weight for each product
and again in the backward pass, and keeps only the bytes between. Decoding is plain torch, equal to the bit to
that of the programs which publish or serve a form (the file of each names them).

Shapes: weights are (..., rows, columns); products sum over columns, along which blocks lie.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.forms.codec import Codec, Layout
from finetune.forms.table import FORMS

# Values that are converted at a time, so that intermediate results stay small beside the weights.
_PART = 2**24

_WHOLE_ROWS = 128
"""Rows of a part are a multiple of this, as no form has scales of more rows."""


@dataclass
class Packing:
    """A format of packed parameters: how bytes become values.

    `shape` is the shape of the values as the model's code reads them, and `dtype` their type unless another is asked
    for. `transposed`: the bytes are those of the values with the last two dimensions exchanged.
    """

    form: str
    scales: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool = False

    def decode(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values into `out` (`shape`)."""
        decode(self.form, codes, self.scales, out.mT if self.transposed else out)

    def decoded(self, codes: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values (`shape`); for transposed ones a view of the transposed tensor."""
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape
        values = torch.empty(shape, dtype=dtype or self.dtype, device=codes.device)
        decode(self.form, codes, self.scales, values)
        return values.mT if self.transposed else values


def packing_of(parameter: Any) -> Packing | None:
    """The packing of a parameter; None if it is not packed."""
    return getattr(parameter, "packing", None)


def known_packing(parameter: Any) -> Packing:
    """The packing of a parameter that is packed."""
    how = packing_of(parameter)
    assert how is not None
    return how


def values(parameter: nn.Parameter) -> torch.Tensor:
    """The values of a packed parameter."""
    return known_packing(parameter).decoded(parameter.data)


def exact(parameter: nn.Parameter) -> torch.Tensor:
    """The values of a packed parameter in float32, in which no form is rounded."""
    return known_packing(parameter).decoded(parameter.data, torch.float32)


def packed(codes: torch.Tensor, how: Packing) -> nn.Parameter:
    """A frozen parameter of these bytes."""
    parameter: Any = nn.Parameter(codes, requires_grad=False)
    parameter.packing = how
    return parameter


def pack(form: str, weight: torch.Tensor, *, transposed: bool = False) -> nn.Parameter:
    """`weight` as a packed parameter on its device, which may be the meta device."""
    rows_first = weight.mT if transposed else weight
    codes, scales = empty(form, rows_first)
    if not weight.is_meta:
        encode(form, rows_first, codes, scales)
    return packed(codes, Packing(form, scales, weight.shape, weight.dtype, transposed))


def digest(model: nn.Module) -> str | None:
    """SHA-256 (hex) of the bytes and scales of the packed weights of `model`; None if it has none."""
    whole, has_packed = hashlib.sha256(), False
    for name, parameter in sorted(model.named_parameters()):
        if how := packing_of(parameter):
            has_packed = True
            whole.update(f"{name} {how.form} {list(how.shape)}".encode())
            for tensor in (parameter.data, how.scales):
                whole.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
    return whole.hexdigest() if has_packed else None


def empty(form: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the bytes and scales of a weight in a form of FORMS, on its device."""
    codec = FORMS[form].codec
    codes, scales = codec.shapes(weight.shape)
    return (
        torch.empty(codes, dtype=torch.uint8, device=weight.device),
        torch.empty(scales, dtype=codec.blocks.scale_dtype, device=weight.device),
    )


@dataclass(frozen=True)
class Published:
    """A packed weight of files: its form, and the names of the tensors of its `layout`, the bytes first."""

    form: str
    layout: Layout
    names: tuple[str, ...]

    def scales(self, codes: torch.Tensor, *stored: torch.Tensor) -> torch.Tensor:
        """The scales of a `Packing` from the tensors of files.

        Raises ValueError as `Layout.scales`, and for scales of another shape than the bytes need.
        """
        for what, each in zip(("bytes", "scales"), (codes, *stored), strict=False):
            if each.dim() < 2:
                raise ValueError(f"its {what} have the shape {list(each.shape)}, not that of blocks and scales")
        scales = self.layout.scales(codes, *stored)
        shape = published_shape(self.form, codes.shape, scales.shape)
        transposed = FORMS[self.form].codec.files.experts_alone
        _check_fit(self.form, codes, scales, _rows_first(shape, transposed=transposed))
        return scales


def published(names: Iterable[str], forms: Iterable[str] | None = None) -> dict[str, Published]:
    """The packed weights of files with tensors of these `names`, by the names that they have in files in 16 bit."""
    known, weights = set(names), {}
    every = (name for name, one in FORMS.items() if one.module)
    for form in every if forms is None else forms:
        for layout in FORMS[form].codec.files.layouts:
            last = layout.endings[-1]
            for plain in (name.removesuffix(last) for name in known if name.endswith(last)):
                parts = tuple(plain + ending for ending in layout.endings)
                if known.issuperset(parts):
                    weights[plain] = Published(form, layout, parts)
    return weights


# Scales of activations and of the KV cache, which are not rounded here.
_OTHER_SCALES = ("activation_scale", "input_scale", "input_global_scale", "k_scale", "v_scale")


def hidden(weights: Mapping[str, Published]) -> set[str]:
    """The tensors of files that only packed weights need, and scales that are not used here."""
    parts = {part for one in weights.values() for part in one.names}
    others = {plain.removesuffix("weight") + scale for plain in weights for scale in _OTHER_SCALES}
    return (parts | others) - weights.keys()


def published_shape(
    form: str, codes: Sequence[int], scales: Sequence[int] = (), *, transposed: bool = False
) -> torch.Size:
    """The shape of the values of a weight of files, by the shapes of its first two tensors, as the model reads them."""
    codec = FORMS[form].codec
    if not codec.files.experts_alone:
        *others, rows, stored_columns = codes
        columns = stored_columns * codec.blocks.columns // codec.blocks.stored
        return torch.Size((*others, columns, rows) if transposed else (*others, rows, columns))
    *others, rows, blocks = scales
    return torch.Size((*others, blocks * codec.blocks.columns, rows))


def from_published(
    form: str, codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype, *,
    transposed: bool = False,
) -> nn.Parameter:  # fmt: skip
    """A packed parameter of bytes, and of scales that its layout has joined.

    `transposed`: the model reads the values transposed, as it does of some forms anyway. Raises ValueError if they do
    not make a weight of this shape.
    """
    transposed = transposed or FORMS[form].codec.files.experts_alone
    rows_first = _rows_first(shape, transposed=transposed)
    codes = codes.view(torch.uint8)
    _check_fit(form, codes, scales, rows_first)
    codes = codes.reshape(FORMS[form].codec.shapes(rows_first)[0])
    return packed(codes, Packing(form, scales, shape, dtype, transposed))


def _rows_first(shape: torch.Size, *, transposed: bool) -> torch.Size:
    return torch.Size((*shape[:-2], shape[-1], shape[-2])) if transposed else shape


def _check_fit(form: str, codes: torch.Tensor, scales: torch.Tensor, rows_first: torch.Size) -> None:
    """Raise ValueError for bytes and scales that do not make a weight of this shape (..., outputs, inputs)."""
    expected = FORMS[form].codec.shapes(rows_first)
    if codes.numel() != expected[0].numel() or scales.shape != expected[1]:
        raise ValueError(
            f"codes {list(codes.shape)} and scales {list(scales.shape)} do not make a weight {list(rows_first)} in "
            f"{form}, which takes {list(expected[0])} and {list(expected[1])}"
        )


# Many operators of torch each; a forecast counts one, with the memory of what is inside (`forecast.operator_costs`).
_library = torch.library.Library("finetune", "FRAGMENT")
for _schema in (
    "pack_(Tensor(a!) codes, Tensor(b!) scales, Tensor weight, str form) -> ()",
    "unpack_(Tensor(a!) out, Tensor codes, Tensor scales, str form) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def encode(form: str, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the bytes and scales of `weight` in a form of FORMS."""
    if FORMS[form].codec.as_operator:
        torch.ops.finetune.pack_(codes, scales, weight, form)
    else:
        encode_in_parts(codes, scales, weight, form)


def decode(form: str, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of bytes and scales into `out`, which is exact in float32 and rounded once to other types."""
    if FORMS[form].codec.as_operator:
        torch.ops.finetune.unpack_(out, codes, scales, form)
    else:
        decode_in_parts(out, codes, scales, form)


def encode_in_parts(codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, form: str) -> None:
    """`encode` by torch's operators, `_PART` values at a time."""
    codec = FORMS[form].codec
    if codec.of_whole:
        codec.of_whole.begin(weight, scales)
    for part in _parts(weight.shape, codec, codes, scales, weight):
        codec.encode(part[2], part[0], part[1])


def decode_in_parts(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, form: str) -> None:
    """`decode` by torch's operators, `_PART` values at a time."""
    codec = FORMS[form].codec
    for part in _parts(out.shape, codec, codes, scales, out):
        codec.decode(*part)


for _name, _program in (("pack_", encode_in_parts), ("unpack_", decode_in_parts)):
    _library.impl(_name, _program, "CompositeExplicitAutograd")
    torch.library.register_fake(f"finetune::{_name}", lambda *tensors: None, lib=_library)


def part_shape(shape: torch.Size) -> torch.Size:
    """The shape (experts, rows, columns) of the parts in which weights are converted: `_PART` values, or 128 rows."""
    *experts, rows, columns = shape
    rows_each = min(max(_PART // columns // _WHOLE_ROWS, 1) * _WHOLE_ROWS, max(rows, 1))
    return torch.Size((min(max(_PART // (rows_each * columns), 1), *(experts or [1])), rows_each, columns))


def _parts(shape: torch.Size, codec: Codec, *tensors: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Bytes, scales and values of each part: some experts, and some rows of each."""
    tensors = tuple(tensor if len(shape) == 3 else tensor.unsqueeze(0) for tensor in tensors)
    experts_each, rows_each, columns = part_shape(shape)
    scale_rows = codec.shapes(torch.Size((rows_each, columns)))[1][0]
    codes, scales, values = tensors
    for some in zip(*(tensor.split(experts_each) for tensor in (codes, scales, values)), strict=True):
        yield from zip(
            some[0].split(rows_each, 1), some[1].split(scale_rows, 1), some[2].split(rows_each, 1), strict=True
        )


# -- layers ------------------------------------------------------------------------------------------------------------


class PackedLinear(nn.Linear):
    """A linear layer whose frozen, packed weight is decoded to the compute dtype for each product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _PackedProduct.apply(x, self.weight.data, packing_of(self.weight), bias)


class PackedEmbedding(nn.Embedding):
    """An embedding whose frozen, packed weight is decoded where it is looked up; the forms of a file have whole rows.

    `of` makes one of any embedding: a class of a model, such as one that scales what it looks up, stays what it is.
    """

    @staticmethod
    def of(embedding: nn.Embedding, weight: nn.Parameter) -> nn.Embedding:
        """A module like `embedding`, with a packed weight."""
        of_model: Any = type(embedding)
        made: nn.Embedding = object.__new__(_packed_class(of_model))
        made.__dict__.update(embedding.__dict__, _parameters={"weight": weight})
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ids (...) to rows (..., embedding_dim)."""
        how, rows = known_packing(self.weight), input.flatten()
        chosen = replace(how, scales=how.scales[rows], shape=torch.Size((len(rows), how.shape[-1])))
        return chosen.decoded(self.weight.data[rows]).view(*input.shape, -1)


@functools.cache
def _packed_class(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """`kind`, with the rows that a `PackedEmbedding` looks up as its weight, whose type it may ask for."""
    if kind is nn.Embedding:
        return PackedEmbedding

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        rows = PackedEmbedding.forward(self, input.flatten())
        of_model: Any = object.__new__(kind)
        of_model.__dict__.update(self.__dict__, _parameters={"weight": rows}, padding_idx=None)
        embedded: torch.Tensor = kind.forward(of_model, torch.arange(len(rows), device=rows.device).view(input.shape))
        return embedded

    return type(kind.__name__, (kind, PackedEmbedding), {"forward": forward})


class _PackedProduct(torch.autograd.Function):
    """Saves neither its input nor the decoded weight, which is decoded again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, how: Packing, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.weight = codes, how
        return functional.linear(x, how.decoded(codes, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, how = ctx.weight
        return gradient @ how.decoded(codes, gradient.dtype), None, None, None
