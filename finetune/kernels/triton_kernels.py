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

from finetune.kernels.room import with_room

_TILE = 2048


@triton.jit
def _start(row, middle, inner, outer_stride, middle_stride, inner_stride):
    """The offset of a row among rows (outer, middle, inner)."""
    rest = row // inner
    start = (rest // middle).to(tl.int64) * outer_stride + (rest % middle).to(tl.int64) * middle_stride
    return start + (row % inner).to(tl.int64) * inner_stride


# -- normalization -----------------------------------------------------------------------------------------------------


@triton.jit
def _rms_norm(
    x, weight, y, rstd, rows, width, y_row, middle, inner, x_outer, x_middle, x_inner,
    EPS: tl.constexpr, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    start = _start(row, middle, inner, x_outer, x_middle, x_inner)
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
    dy, x, onto, weight, rstd, dx, rows, width, dx_row, middle, inner, dy_outer, dy_middle, dy_inner, x_outer, x_middle,
    x_inner, onto_outer, onto_middle, onto_inner, OFFSET: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    start = _start(row, middle, inner, x_outer, x_middle, x_inner)
    values = tl.load(x + start[:, None] + column, inside, 0.0).to(tl.float32)
    start = _start(row, middle, inner, dy_outer, dy_middle, dy_inner)
    grad = tl.load(dy + start[:, None] + column, inside, 0.0).to(tl.float32)
    grad *= tl.load(weight + column, column < width, 0.0).to(tl.float32) + OFFSET
    inverse = tl.load(rstd + row, row < rows, 0.0)
    along = tl.sum(grad * values, 1) / width * inverse * inverse * inverse
    grad = grad * inverse[:, None] - values * along[:, None]
    if ADDS:
        start = _start(row, middle, inner, onto_outer, onto_middle, onto_inner)
        grad += tl.load(onto + start[:, None] + column, inside, 0.0).to(tl.float32)
    tl.store(dx + (row.to(tl.int64) * dx_row)[:, None] + column, grad.to(dx.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_first: bool = True, room: int = 0
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    y, rstd = with_room(x, room), x.new_empty(x.shape[:-1], dtype=torch.float32)
    grid, sizes = _tiles_of_rows(rstd.numel(), width)
    _rms_norm[grid](
        x, weight, y, rstd, rstd.numel(), width, y.shape[-1], *_rows(x),
        EPS=eps, OFFSET=offset, CAST_FIRST=cast_first, **sizes,
    )  # fmt: skip
    return y, rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0, onto: Tensor | None = None, room: int = 0
) -> Tensor:
    width, dx, added = x.shape[-1], with_room(x, room), x if onto is None else onto
    grid, sizes = _tiles_of_rows(rstd.numel(), width)
    _rms_norm_backward[grid](
        dy, x, added, weight, rstd, dx, rstd.numel(), width, dx.shape[-1], *_rows(dy, x, added), OFFSET=offset,
        ADDS=onto is not None, **sizes,
    )  # fmt: skip
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
    _assert_along_rows(q, k, cos, sin)
    rows, tokens, q_heads, _ = q.shape
    k_heads, half = k.shape[2], cos.shape[-1] // 2
    cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
    size = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(max(q_heads, k_heads)), max(_TILE // size, 1))
    _rope[rows * tokens, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)](
        q, k, cos, sin, tokens, q_heads, k_heads, half, *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2],
        *sin.stride()[:2], BACKWARD=backward, HEADS=heads, HALF=size, **_options(heads * size),
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
    gate, up, out, width, out_row, middle, inner, gate_outer, gate_middle, gate_inner, up_outer, up_middle, up_inner,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    gate += _start(row, middle, inner, gate_outer, gate_middle, gate_inner) + column
    up += _start(row, middle, inner, up_outer, up_middle, up_inner) + column
    activated, _ = _activate(tl.load(gate, inside, 0.0).to(tl.float32), ACTIVATION)
    activated *= tl.load(up, inside, 0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_row + column, activated.to(out.dtype.element_ty), inside)


@triton.jit
def _gated_low(
    gate, up, out, factor, rows, width, rank, out_row, middle, inner, gate_outer, gate_middle, gate_inner,
    up_outer, up_middle, up_inner, SCALE, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """`_gated` for some whole rows, and their product with a factor (rank, width) beside them."""
    row, below = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
    gate += _start(row, middle, inner, gate_outer, gate_middle, gate_inner)[:, None]
    up += _start(row, middle, inner, up_outer, up_middle, up_inner)[:, None]
    out += (row.to(tl.int64) * out_row)[:, None]
    low = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        activated, _ = _activate(tl.load(gate + column[None, :], inside, 0.0).to(tl.float32), ACTIVATION)
        activated *= tl.load(up + column[None, :], inside, 0.0).to(tl.float32)
        rounded = activated.to(out.dtype.element_ty)
        tl.store(out + column[None, :], rounded, inside)
        at = factor + below[None, :] * width + column[:, None]
        right = tl.load(at, (below < rank)[None, :] & (column < width)[:, None], 0.0)
        low = tl.dot(rounded, right, low, input_precision="ieee")
    beside = (row < rows)[:, None] & (below < rank)[None, :]
    tl.store(out + width + below[None, :], (low * SCALE).to(out.dtype.element_ty), beside)


@triton.jit
def _add_product(total, left, left_row, row, rows, rank, right, RANK: tl.constexpr):
    """`total` (RANK, columns) and the product of the same rows of `left` (rows, rank), transposed, and `right`."""
    below = tl.arange(0, RANK)
    at = left + (row.to(tl.int64) * left_row)[None, :] + below[:, None]
    transposed = tl.load(at, (row < rows)[None, :] & (below < rank)[:, None], 0.0)
    return tl.dot(transposed, right, total, input_precision="ieee")


@triton.jit
def _gated_backward(
    gate, up, da, s, low_gate, low_up, of_s, of_gate, of_up, rows, width, s_rank, gate_rank, up_rank, s_row,
    low_gate_row, low_up_row, middle, inner, gate_outer, gate_middle, gate_inner, up_outer, up_middle, up_inner,
    da_outer, da_middle, da_inner, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    S_RANK: tl.constexpr, GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr,
):  # fmt: skip
    """All rows of some columns, so that the sums over rows need no other program's, and come in one order."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    sum_s = tl.zeros((S_RANK, WIDTH), tl.float32)
    sum_gate, sum_up = tl.zeros((GATE_RANK, WIDTH), tl.float32), tl.zeros((UP_RANK, WIDTH), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at_gate = gate + _start(row, middle, inner, gate_outer, gate_middle, gate_inner)[:, None] + column[None, :]
        at_up = up + _start(row, middle, inner, up_outer, up_middle, up_inner)[:, None] + column[None, :]
        at_da = da + _start(row, middle, inner, da_outer, da_middle, da_inner)[:, None] + column[None, :]
        grad = tl.load(at_da, inside, 0.0).to(tl.float32)
        factor = tl.load(at_up, inside, 0.0).to(tl.float32)
        activated, slope = _activate(tl.load(at_gate, inside, 0.0).to(tl.float32), ACTIVATION)
        product = (activated * factor).to(da.dtype.element_ty)
        sum_s = _add_product(sum_s, s, s_row, row, rows, s_rank, product, S_RANK)
        product = (grad * factor * slope).to(gate.dtype.element_ty)
        tl.store(at_gate, product, inside)
        sum_gate = _add_product(sum_gate, low_gate, low_gate_row, row, rows, gate_rank, product, GATE_RANK)
        product = (grad * activated).to(up.dtype.element_ty)
        tl.store(at_up, product, inside)
        sum_up = _add_product(sum_up, low_up, low_up_row, row, rows, up_rank, product, UP_RANK)
    inside = (column < width)[None, :]
    below = tl.arange(0, S_RANK)[:, None]
    tl.store(of_s + below * width + column[None, :], sum_s.to(of_s.dtype.element_ty), inside & (below < s_rank))
    below = tl.arange(0, GATE_RANK)[:, None]
    at = column.to(tl.int64)[None, :] * gate_rank + below
    tl.store(of_gate + at, sum_gate.to(of_gate.dtype.element_ty), inside & (below < gate_rank))
    below = tl.arange(0, UP_RANK)[:, None]
    at = column.to(tl.int64)[None, :] * up_rank + below
    tl.store(of_up + at, sum_up.to(of_up.dtype.element_ty), inside & (below < up_rank))


def gated(
    gate: Tensor, up: Tensor, activation: str, room: int = 0, factor: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    width, out = gate.shape[-1], with_room(gate, room)
    rows = gate.numel() // width
    if factor is None:
        grid, sizes = _tiles_of_columns(rows, width)
        _gated[grid](gate, up, out, width, out.shape[-1], *_rows(gate, up), ACTIVATION=activation, **sizes)
        return out
    rank = _padded_rank(factor)
    _gated_low[triton.cdiv(rows, _ROWS),](
        gate, up, out, factor.contiguous(), rows, width, len(factor), out.shape[-1], *_rows(gate, up), scale,
        ACTIVATION=activation, RANK=rank, **_tile_with_product(rank, factor, 2048, 3),
    )  # fmt: skip
    return out


def gated_backward_(
    gate: Tensor, up: Tensor, da: Tensor, activation: str, s: Tensor, of_gate: Tensor, of_up: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width, lows = gate.shape[-1], (s, of_gate, of_up)
    _assert_along_rows(*lows)
    of_s = s.new_empty(s.shape[1], width, dtype=dtype)
    others = [low.new_empty(width, low.shape[1], dtype=dtype) for low in lows[1:]]
    ranks = [_padded_rank(low.t()) for low in lows]
    sizes = _tile_with_product(max(ranks), s, 1024, 2)
    _gated_backward[triton.cdiv(width, sizes["WIDTH"]),](
        gate, up, da, *lows, of_s, *others, len(s), width, *(low.shape[1] for low in lows),
        *(low.stride(0) for low in lows), *_rows(gate, up, da), ACTIVATION=activation, S_RANK=ranks[0],
        GATE_RANK=ranks[1], UP_RANK=ranks[2], **sizes,
    )  # fmt: skip
    return of_s, *others


_ROWS = 32


def _padded_rank(factor: Tensor) -> int:
    """A power of two, no less than the rank of a factor (rank, width) and the 16 that a tensor core wants."""
    return max(triton.next_power_of_2(len(factor)), 16)


def _tile_with_product(rank: int, factor: Tensor, sums: int, ahead: int) -> dict[str, int]:
    """Sizes of a tile that is multiplied by a factor of this rank.

    About as many partial sums as `sums` stay in registers, and up to `ahead` tiles, loaded in advance, fit in 48 KiB of
    shared memory.
    """
    stages = ahead if rank * factor.element_size() <= 128 else 1
    width = min(max(sums // rank, 16), 64)
    return {"ROWS": _ROWS, "WIDTH": width, "num_warps": 8, "num_stages": stages, "enable_fp_fusion": False}


# -- logits ------------------------------------------------------------------------------------------------------------


@triton.jit
def _capped(y, scale, softcap, CAPPED: tl.constexpr):
    """The logits before the temperature, and the slope of the cap."""
    z, slope = y * scale, 1.0
    if CAPPED:
        tanh = 2 * tl.sigmoid(2 * z / softcap) - 1
        z, slope = softcap * tanh, 1 - tanh * tanh
    return z, slope


@triton.jit
def _fold_logits(
    sums, logits, labels, tokens, columns, row_stride, start, scale, softcap, inverse, CAPPED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * row_stride
    largest, total = tl.load(sums + token), tl.load(sums + tokens + token)
    for first in range(0, columns, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = column < columns
        z, _ = _capped(tl.load(row + column, inside, 0.0).to(tl.float32), scale, softcap, CAPPED)
        z = tl.where(inside, z * inverse, -float("inf"))
        new = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(z - new), 0)
        largest = new
    tl.store(sums + token, largest)
    tl.store(sums + tokens + token, total)
    column = tl.load(labels + token) - start
    if (column >= 0) & (column < columns):
        z, _ = _capped(tl.load(row + column).to(tl.float32), scale, softcap, CAPPED)
        tl.store(sums + 2 * tokens + token, z * inverse)


@triton.jit
def _unfold_logits(
    logits, labels, log_z, outer, columns, row_stride, start, scale, softcap, inverse, CAPPED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at, inside = logits + token * row_stride + column, column < columns
    z, slope = _capped(tl.load(at, inside, 0.0).to(tl.float32), scale, softcap, CAPPED)
    probability = tl.exp(z * inverse - tl.load(log_z + token))
    is_label = (column + start == tl.load(labels + token)).to(tl.float32)
    gradient = tl.load(outer + token) * (is_label - probability) * inverse * scale * slope
    tl.store(at, gradient.to(logits.dtype.element_ty), inside)


def fold_logits_(
    sums: Tensor, logits: Tensor, labels: Tensor, start: int, scale: float, softcap: float | None, inverse: float
) -> None:
    _assert_along_rows(sums, logits, labels)
    _fold_logits[len(logits),](
        sums, logits, labels, sums.stride(0), logits.shape[1], logits.stride(0), start, scale, softcap or 1.0, inverse,
        CAPPED=softcap is not None, WIDTH=_TILE, **_options(_TILE),
    )  # fmt: skip


def unfold_logits_(
    logits: Tensor, labels: Tensor, log_z: Tensor, outer: Tensor, start: int, scale: float, softcap: float | None,
    inverse: float,
) -> None:  # fmt: skip
    _assert_along_rows(logits, labels, log_z, outer)
    _unfold_logits[len(logits), triton.cdiv(logits.shape[1], _TILE)](
        logits, labels, log_z, outer, logits.shape[1], logits.stride(0), start, scale, softcap or 1.0, inverse,
        CAPPED=softcap is not None, WIDTH=_TILE, **_options(_TILE),
    )  # fmt: skip


# -- weights -----------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_4bit(
    out, packed, code, absmax, absmax_code, absmax_scale, absmax_offset, count, pairs, width, out_row, beside, rank, at,
    columns, decoding, NESTED: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first programs are `decoding`, and the others write what stands beside the weight, if anything does."""
    program = tl.program_id(0)
    if COLUMNS == 0 or program < decoding:
        _decode_blocks(
            program, out, packed, code, absmax, absmax_code, absmax_scale, absmax_offset, count, pairs, width, out_row,
            NESTED, ALIGNED, SIZE, BLOCKS,
        )  # fmt: skip
    else:
        row, column = (program - decoding) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
        inside = row < count // width
        values = tl.zeros((ROWS, COLUMNS), tl.float32)
        if beside is not None:
            own = inside & (column >= at) & (column < at + rank)
            values += tl.load(beside + row.to(tl.int64) * rank + column - at, own, 0.0)
        to = out + width + row.to(tl.int64) * out_row + column
        tl.store(to, values.to(out.dtype.element_ty), inside & (column < columns))


@triton.jit
def _decode_blocks(
    program, out, packed, code, absmax, absmax_code, absmax_scale, absmax_offset, count, pairs, width, out_row,
    NESTED: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`BLOCKS` blocks of `SIZE` values with a scale each; `NESTED` scales of 8 bits share one, 0 for none.

    `ALIGNED`: no block reaches from one row of the weight into the next.
    """
    block = program * BLOCKS + tl.arange(0, BLOCKS)
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
    absmax_blocksize: int = 256, inputs: int | None = None, beside: Tensor | None = None, at: int = 0,
) -> None:  # fmt: skip
    packed, rows, width = packed.view(torch.uint8), len(out), out.shape[-1] if inputs is None else inputs
    count, columns = rows * width, out.shape[-1] - width
    blocks, padded = max(_TILE // blocksize, 1), triton.next_power_of_2(columns) if columns else 0
    decoding, each = triton.cdiv(count, blocks * blocksize), max(_TILE // max(padded, 1), 1)
    factor = None if beside is None else beside.contiguous()
    _decode_4bit[decoding + (triton.cdiv(rows, each) if columns else 0),](
        out, packed, _code(quant_type, out.device), absmax, absmax_code, absmax_scale, absmax_offset, count,
        packed.numel(), width, out.stride(0), factor, 0 if beside is None else beside.shape[1], at, columns, decoding,
        NESTED=0 if absmax_code is None else absmax_blocksize, ALIGNED=width % blocksize == 0, SIZE=blocksize,
        BLOCKS=blocks, ROWS=each, COLUMNS=padded, **_options(blocks * blocksize),
    )  # fmt: skip


def decode_int8_(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    grid, sizes = _tiles_of_columns(*out.shape)
    _decode_int8[grid](out, codes, scales, out.shape[-1], out.stride(0), **sizes)


def multiply_joined_(out: Tensor, left: Tensor, right: Tensor, end: int) -> None:
    torch.mm(left, right, out=out)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    # cuBLAS writes float32 sums of 16-bit factors, no other types than these two.
    if dtype is torch.float32 and left.dtype is not dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


@cache
def _code(quant_type: str, device: torch.device) -> Tensor:
    """The 16 values of the type; they stay on the device."""
    return bnb.functional.get_4bit_type(quant_type, device)


# -- shapes ------------------------------------------------------------------------------------------------------------


def _rows(*tensors: Tensor) -> list[int]:
    """Arguments of `_start` for tensors (..., width) of one shape: middle, inner, and each tensor's strides."""
    _assert_along_rows(*tensors)
    try:  # rows at one distance
        views = [tensor.view(-1, 1, 1, tensor.shape[-1]) for tensor in tensors]
    except RuntimeError:
        views = [tensor[(None,) * (4 - tensor.dim())] for tensor in tensors]
    return [*views[0].shape[1:3], *(stride for view in views for stride in view.stride()[:3])]


def _assert_along_rows(*tensors: Tensor) -> None:
    """The kernels read and write elements of a row side by side; other strides would give other numbers."""
    assert all(tensor.stride(-1) == 1 for tensor in tensors)


def _tiles_of_rows(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """A grid of tiles of whole rows, as many as fit."""
    padded = triton.next_power_of_2(width)
    each = max(_TILE // padded, 1)
    return (triton.cdiv(rows, each),), {"ROWS": each, "WIDTH": padded, **_options(each * padded)}


def _tiles_of_columns(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """A grid of tiles of a part of one row."""
    part = min(triton.next_power_of_2(width), _TILE)
    return (rows, triton.cdiv(width, part)), {"WIDTH": part, **_options(part)}


def _options(values: int) -> dict[str, int]:
    """Launch options: 16 values a thread, in up to 32 warps of 32 threads.

    Fused multiply-adds are switched off, because torch's operators and bitsandbytes round products before sums; their
    default differs from one version of Triton to the next.
    """
    return {"num_warps": min(max(values // 512, 1), 32), "enable_fp_fusion": False}
