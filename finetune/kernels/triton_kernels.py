"""The operators of `ops` on CUDA: Triton kernels, and functions of the operators' names that launch them.

They read and write each value once, compute in float32 and round once. Offsets are of 64 bits wherever rows enter.
A tile has about 2,048 values, so that a thread holds few enough of them for registers.

Liger's kernels (0.8.5) are not taken: its norm and SwiGLU write gradients over their inputs, and its rotary embedding
over its own, unseen by torch's version counters; none writes into a wider row, and RoPE is patched for a whole process.

Importing this module needs Triton.
"""

from __future__ import annotations

from functools import cache

import bitsandbytes as bnb
import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048


# -- normalization -----------------------------------------------------------------------------------------------------


@triton.jit
def _rms_norm(
    x, weight, y, rstd, rows, inner, width, x_outer, x_inner, y_row,
    EPS: tl.constexpr, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    start = (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    values = tl.load(x + start[:, None] + column, inside, 0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / width + EPS)
    values *= inverse[:, None]
    if CAST_FIRST:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    values *= tl.load(weight + column, column < width, 0.0).to(tl.float32) + OFFSET
    tl.store(y + (row.to(tl.int64) * y_row)[:, None] + column, values.to(y.dtype.element_ty), inside)
    tl.store(rstd + row, inverse, row < rows)


@triton.jit
def _rms_norm_backward(
    dy, x, weight, rstd, dx, rows, inner, width, dy_outer, dy_inner, x_outer, x_inner,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    outer, inner = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    values = tl.load(x + (outer * x_outer + inner * x_inner)[:, None] + column, inside, 0.0).to(tl.float32)
    grad = tl.load(dy + (outer * dy_outer + inner * dy_inner)[:, None] + column, inside, 0.0).to(tl.float32)
    grad *= tl.load(weight + column, column < width, 0.0).to(tl.float32) + OFFSET
    inverse = tl.load(rstd + row, row < rows, 0.0)
    along = tl.sum(grad * values, 1) / width * inverse * inverse * inverse
    grad = grad * inverse[:, None] - values * along[:, None]
    tl.store(dx + (row.to(tl.int64) * width)[:, None] + column, grad.to(dx.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_first: bool = True, room: int = 0
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    y = x.new_empty((*x.shape[:-1], width + room))
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    _, inner, *strides = _rows(x)
    grid, sizes = _tiles_of_rows(rstd.numel(), width)
    _rms_norm[grid](
        x, weight, y, rstd, rstd.numel(), inner, width, *strides, width + room,
        EPS=eps, OFFSET=offset, CAST_FIRST=cast_first, **sizes,
    )  # fmt: skip
    return y, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0) -> Tensor:
    width = x.shape[-1]
    dx = x.new_empty(x.shape)
    _, inner, *strides = _rows(x)
    grid, sizes = _tiles_of_rows(rstd.numel(), width)
    _rms_norm_backward[grid](
        dy, x, weight, rstd, dx, rstd.numel(), inner, width, *_rows(dy)[2:], *strides, OFFSET=offset, **sizes
    )
    return dx


# -- rotary embedding --------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    pointer, row, token, first, heads, outer, inner, each, cos, sin, half, HEADS: tl.constexpr, HALF: tl.constexpr
):
    head = first + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    left = pointer + row * outer + token * inner + head * each + column
    right = left + half
    a = tl.load(left, inside, 0.0).to(tl.float32)
    b = tl.load(right, inside, 0.0).to(tl.float32)
    tl.store(left, (a * cos - b * sin).to(pointer.dtype.element_ty), inside)
    tl.store(right, (b * cos + a * sin).to(pointer.dtype.element_ty), inside)


@triton.jit
def _rope(
    q, k, cos, sin, tokens, q_heads, k_heads, half, q_outer, q_inner, q_head, k_outer, k_inner, k_head,
    cos_outer, cos_inner, sin_outer, sin_inner, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    cosine = tl.load(cos + row * cos_outer + token * cos_inner + column, column < half, 0.0).to(tl.float32)
    sine = tl.load(sin + row * sin_outer + token * sin_inner + column, column < half, 0.0).to(tl.float32)
    if BACKWARD:
        sine = -sine
    first = tl.program_id(1) * HEADS
    first_k = first - tl.cdiv(q_heads, HEADS) * HEADS
    if first_k < 0:
        _rotate(q, row, token, first, q_heads, q_outer, q_inner, q_head, cosine, sine, half, HEADS, HALF)
    else:
        _rotate(k, row, token, first_k, k_heads, k_outer, k_inner, k_head, cosine, sine, half, HEADS, HALF)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> None:
    rows, tokens, q_heads, _ = q.shape
    k_heads, half = k.shape[2], cos.shape[-1] // 2
    cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
    size = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(max(q_heads, k_heads)), max(_TILE // size, 1))
    _rope[rows * tokens, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)](
        q, k, cos, sin, tokens, q_heads, k_heads, half, *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2],
        *sin.stride()[:2], BACKWARD=backward, HEADS=heads, HALF=size, num_warps=_warps(heads * size),
    )  # fmt: skip


# -- gated activations -------------------------------------------------------------------------------------------------


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """The activation at x and its derivative there; gelu_tanh by 1 + tanh(u) = 2 sigmoid(2u)."""
    if ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        share = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        slope = share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        tl.static_assert(ACTIVATION == "silu")
        share = tl.sigmoid(x)
        slope = share + x * share * (1.0 - share)
    return x * share, slope


@triton.jit
def _gated(
    gate, up, out, inner, width, gate_outer, gate_inner, up_outer, up_inner, out_row,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    outer, inner = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    inside = column < width
    x = tl.load(gate + outer * gate_outer + inner * gate_inner + column, inside, 0.0).to(tl.float32)
    activated, _ = _activate(x, ACTIVATION)
    activated *= tl.load(up + outer * up_outer + inner * up_inner + column, inside, 0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_row + column, activated.to(out.dtype.element_ty), inside)


@triton.jit
def _gated_backward(
    da, gate, up, inner, width, da_outer, da_inner, gate_outer, gate_inner, up_outer, up_inner,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    outer, inner = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    inside = column < width
    da += outer * da_outer + inner * da_inner + column
    gate += outer * gate_outer + inner * gate_inner + column
    up += outer * up_outer + inner * up_inner + column
    grad = tl.load(da, inside, 0.0).to(tl.float32)
    factor = tl.load(up, inside, 0.0).to(tl.float32)
    activated, slope = _activate(tl.load(gate, inside, 0.0).to(tl.float32), ACTIVATION)
    tl.store(da, (activated * factor).to(da.dtype.element_ty), inside)
    tl.store(gate, (grad * factor * slope).to(gate.dtype.element_ty), inside)
    tl.store(up, (grad * activated).to(up.dtype.element_ty), inside)


def gated(gate: Tensor, up: Tensor, activation: str, room: int = 0) -> Tensor:
    out = gate.new_empty((*gate.shape[:-1], gate.shape[-1] + room))
    outer, inner, *strides = _rows(gate)
    grid, sizes = _tiles_of_columns(outer * inner, gate.shape[-1])
    _gated[grid](
        gate, up, out, inner, gate.shape[-1], *strides, *_rows(up)[2:], out.shape[-1], ACTIVATION=activation, **sizes
    )
    return out


def gated_backward_(da: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    outer, inner, *strides = _rows(da)
    grid, sizes = _tiles_of_columns(outer * inner, da.shape[-1])
    _gated_backward[grid](
        da, gate, up, inner, da.shape[-1], *strides, *_rows(gate)[2:], *_rows(up)[2:], ACTIVATION=activation, **sizes
    )


# -- weights -----------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_4bit(
    out, packed, code, absmax, absmax_code, absmax_scale, absmax_offset, count, pairs, width, out_row,
    NESTED: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`BLOCKS` blocks of `SIZE` values with a scale each; `NESTED` scales of 8 bits share one, 0 for none.

    `ALIGNED`: no block reaches from one row of the weight into the next.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    start = block.to(tl.int64) * SIZE
    if NESTED:
        index = tl.load(absmax + block, start < count, 0).to(tl.int32)
        scale = tl.load(absmax_code + index) * tl.load(absmax_scale + block // NESTED, start < count, 0.0)
        scale += tl.load(absmax_offset)
    else:
        scale = tl.load(absmax + block, start < count, 0.0).to(tl.float32)
    pair = (start // 2)[:, None] + tl.arange(0, SIZE // 2)[None, :]
    byte = tl.load(packed + pair, pair < pairs, 0).to(tl.int32)
    values = tl.interleave(tl.load(code + (byte >> 4)), tl.load(code + (byte & 15))) * scale[:, None]
    at = tl.arange(0, SIZE)[None, :]
    inside = start[:, None] + at < count
    if ALIGNED:
        in_row = width // SIZE
        at = ((block // in_row).to(tl.int64) * out_row + block % in_row * SIZE)[:, None] + at
    else:
        at = start[:, None] + at
        at = at // width * out_row + at % width
    tl.store(out + at, values.to(out.dtype.element_ty), inside)


@triton.jit
def _decode_int8(out, codes, scales, width, out_row, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    scale = tl.load(scales + row) * (1.0 / 127.0)
    values = tl.load(codes + row * width + column, inside, 0).to(tl.float32) * scale
    tl.store(out + row * out_row + column, values.to(out.dtype.element_ty), inside)


def decode_4bit_(
    out: Tensor, packed: Tensor, absmax: Tensor, blocksize: int, quant_type: str,
    absmax_code: Tensor | None = None, absmax_scale: Tensor | None = None, absmax_offset: Tensor | None = None,
    absmax_blocksize: int = 256,
) -> None:  # fmt: skip
    packed, count, width = packed.view(torch.uint8), out.numel(), out.shape[-1]
    blocks = max(_TILE // blocksize, 1)
    # The offset is added to a rounded product, as in bitsandbytes: fused, the two would be rounded once.
    _decode_4bit[triton.cdiv(count, blocks * blocksize),](
        out, packed, _code(quant_type, out.device), absmax, absmax_code, absmax_scale, absmax_offset, count,
        packed.numel(), width, out.stride(0), NESTED=0 if absmax_code is None else absmax_blocksize,
        ALIGNED=width % blocksize == 0, SIZE=blocksize, BLOCKS=blocks, num_warps=_warps(blocks * blocksize),
        enable_fp_fusion=False,
    )  # fmt: skip


def decode_int8_(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    grid, sizes = _tiles_of_columns(*out.shape)
    _decode_int8[grid](out, codes, scales, out.shape[-1], out.stride(0), **sizes)


@cache
def _code(quant_type: str, device: torch.device) -> Tensor:
    """The 16 values of the type; they stay on the device."""
    return bnb.functional.get_4bit_type(quant_type, device)


# -- shapes ------------------------------------------------------------------------------------------------------------


def _rows(tensor: Tensor) -> tuple[int, int, int, int]:
    """The rows of a tensor (..., width) as (outer, inner), how many of each and how far apart, in values."""
    view = tensor.view(-1, *tensor.shape[-2:]) if tensor.dim() > 3 else tensor
    view = view[(None,) * (3 - view.dim())]
    return view.shape[0], view.shape[1], view.stride(0), view.stride(1)


def _tiles_of_rows(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """A grid of tiles of whole rows, as many as fit."""
    padded = triton.next_power_of_2(width)
    each = max(_TILE // padded, 1)
    return (triton.cdiv(rows, each),), {"ROWS": each, "WIDTH": padded, "num_warps": _warps(each * padded)}


def _tiles_of_columns(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """A grid of tiles of a part of one row."""
    part = min(triton.next_power_of_2(width), _TILE)
    return (rows, triton.cdiv(width, part)), {"WIDTH": part, "num_warps": _warps(part)}


def _warps(values: int) -> int:
    """16 values a thread, in up to 32 warps of 32 threads."""
    return min(max(values // 512, 1), 32)
