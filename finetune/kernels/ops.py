"""The operators of the fused path, each with an implementation for the CPU and the shapes of its results.

Each is one operator of torch (`torch.ops.finetune`), so that selective checkpointing can keep its result and a trace
counts it as one call. On a CPU it is made of torch's operators, rounded where the modules of transformers round; on
CUDA it is a Triton kernel of `triton_kernels`, which computes in float32 and rounds once. They have no derivatives:
autograd functions call them.

Tensors are of 16 or 32 bits; each may be strided in all dimensions but its last (`along_rows`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from finetune.forms import packed as packed_weights
from finetune.forms.packed import packing_of
from finetune.kernels.room import with_room
from finetune.runtime import libraries

_library = torch.library.Library("finetune", "DEF")
_aten = torch.ops.aten

ON_CPU: dict[str, Callable[..., Any]] = {}
"""Each operator's program of torch's operators for a CPU, by full name such as `finetune::rms_norm`."""
WITHOUT_TRITON: dict[str, Callable[..., Any]] = {}
"""The programs that also run on CUDA where Triton does not: those of the loss, which no step can do without."""


def _operator(
    schema: str, kernels: str = "triton_kernels", *, without_triton: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Make the operator of `schema` from its implementation for the CPU, and name it after that.

    On CUDA the function of the same name in the module `kernels` is called, or the same implementation if that is
    empty. `without_triton`: on CUDA without Triton, the implementation for the CPU runs there.

    `torch.library.custom_op` would do the same at 25 microseconds a call instead of 9.
    """

    written = schema.count("!")  # tensors that the operator writes into come first

    def define(program: Callable[..., Any]) -> Any:
        name = program.__name__

        def on_cuda(*args: Any, **named: Any) -> Any:
            if without_triton and libraries.triton_obstacle():
                return program(*args, **named)
            module = importlib.import_module(f"finetune.kernels.{kernels}")
            increment_version(args[:written])
            with torch.cuda.device(args[0].device):
                return getattr(module, name)(*args, **named)

        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, program, "CPU")
        _library.impl(name, on_cuda if kernels else program, "CUDA")
        if schema.endswith("-> ()"):
            torch.library.register_fake(f"finetune::{name}", lambda *args, **named: None, lib=_library)
        ON_CPU[f"finetune::{name}"] = program
        if without_triton:
            WITHOUT_TRITON[f"finetune::{name}"] = program
        return getattr(torch.ops.finetune, name).default

    return define


def along_rows(tensor: Tensor) -> Tensor:
    """`tensor` with stride 1 along its last dimension, as the kernels read it; a product may return it transposed."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _fake(operator: Any) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.register_fake(operator, lib=_library)


@_operator(
    "(Tensor x, Tensor weight, float eps, float offset=0.0, bool cast_first=True, int room=0) -> (Tensor, Tensor)"
)
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_first: bool = True, room: int = 0
) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalization: y (..., width and `room`) in x's type, and 1/rms (...) in float32.

    `offset` is added to the weight (1.0 in Gemma). `cast_first`: the normalized values are rounded to x's type before
    the product with the weight (Llama), and not only after it (Gemma, OLMo 2). The columns beside the `width` values,
    at least `room`, have no meaning.
    """
    y, rstd = _clean(with_room(x, room), x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    weight = weight if cast_first else weight.float()
    weight = weight + offset if offset else weight
    for values, out, inverse in _blocks(x, y[..., : x.shape[-1]] if room else y, rstd):
        squares = values.float().pow(2)
        torch.rsqrt(squares.mean(-1, keepdim=True) + eps, out=inverse)
        normalized = torch.mul(values, inverse, out=squares)
        torch.mul(normalized.to(x.dtype) if cast_first else normalized, weight, out=out)
    return y, rstd.squeeze(-1)


@_fake(rms_norm)
def _(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast_first: bool = True, room: int = 0
) -> tuple[Tensor, Tensor]:
    return with_room(x, room), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _clean(out: Tensor, like: Tensor) -> Tensor:
    """`out` with zeros in its room: with AMX, oneDNN multiplies what stands beside a row by zero, which keeps a NaN
    (torch 2.13, widths that 32 does not divide).
    """
    out[..., like.shape[-1] :].zero_()
    return out


@_operator(
    "(Tensor dy, Tensor x, Tensor weight, Tensor rstd, float offset=0.0, Tensor? onto=None, int room=0) -> Tensor"
)
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0, onto: Tensor | None = None, room: int = 0
) -> Tensor:
    """The gradient of x (..., width and `room`) from that of y, the inputs of `rms_norm` and its 1/rms.

    With g = dy * weight: dx = g * rstd - x * rstd^3 * mean(g * x), in float32; plus `onto`, a gradient of x from
    elsewhere. The weight is frozen.
    """
    wide, weight = _clean(with_room(x, room), x), weight.float() + offset if offset else weight.float()
    dx = wide[..., : x.shape[-1]] if room else wide
    for gradient, values, inverse, out in _blocks(dy, x, rstd.unsqueeze(-1), dx):
        scaled, values = gradient.float() * weight, values.float()
        along = (scaled * values).mean(-1, keepdim=True).mul_(inverse.pow(3))
        torch.addcmul(scaled.mul_(inverse), values, along, value=-1, out=out)
    if onto is not None:
        dx.add_(onto)
    return wide


@_fake(rms_norm_backward)
def _(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0, onto: Tensor | None = None, room: int = 0
) -> Tensor:
    return with_room(x, room)


@_operator("(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool backward=False) -> ()")
def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> None:
    """Rotate queries and keys (rows, tokens, heads, head_dim) in place, or their gradients back.

    `cos` and `sin` are (rows or 1, tokens, rotated), each half of the rotated dimensions the same (rotate-half
    convention): the first half is read. Dimensions from `rotated` on stay as they are.
    """
    half, sign = cos.shape[-1] // 2, -1 if backward else 1
    cos, sin = cos[..., None, :half], sin[..., None, :half]
    for tensor in (q, k):
        each = max(_BLOCK * tensor.shape[1] // max(tensor.numel(), 1), 1)  # tokens of a block
        for values, cosine, sine in zip(*(one.split(each, dim=1) for one in (tensor, cos, sin)), strict=True):
            first, second = values[..., :half], values[..., half : 2 * half]
            from_first, from_second = first * sine, second * sine
            first.mul_(cosine).sub_(from_second, alpha=sign)
            second.mul_(cosine).add_(from_first, alpha=sign)


_ACTIVATE: dict[str, Callable[..., Tensor]] = {
    "silu": lambda x, out: _aten.silu.out(x, out=out),
    "gelu": lambda x, out: _aten.gelu.out(x, out=out),
    "gelu_tanh": lambda x, out: _aten.gelu.out(x, approximate="tanh", out=out),
}
_ACTIVATE_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "silu": lambda dy, x, out: _aten.silu_backward.grad_input(dy, x, grad_input=out),
    "gelu": lambda dy, x, out: _aten.gelu_backward.grad_input(dy, x, grad_input=out),
    "gelu_tanh": lambda dy, x, out: _aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=out),
}
ACTIVATIONS = tuple(_ACTIVATE)


@_operator("(Tensor gate, Tensor up, str activation, int room=0, Tensor? factor=None, float scale=1.0) -> Tensor")
def gated(
    gate: Tensor, up: Tensor, activation: str, room: int = 0, factor: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """a = `activation`(gate) * up (..., width and `room`), for one of ACTIVATIONS.

    With a `factor` (r, width), the r columns beside a are scale * a factorᵀ. Further columns have no meaning.
    """
    out = _clean(with_room(gate, room), gate)
    for x, factor_of_x, result in _blocks(gate, up, out[..., : gate.shape[-1]]):
        _ACTIVATE[activation](x, result).mul_(factor_of_x)
    if factor is not None:
        whole = out.view(-1, out.shape[-1])
        a, low = whole[:, : gate.shape[-1]], whole[:, gate.shape[-1] : gate.shape[-1] + len(factor)]
        multiply_(low, a, factor.t(), None, scale)
    return out


@_fake(gated)
def _(
    gate: Tensor, up: Tensor, activation: str, room: int = 0, factor: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    return with_room(gate, room)


@_operator(
    "(Tensor(a!) gate, Tensor(b!) up, Tensor da, str activation, Tensor s, Tensor of_gate, Tensor of_up, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)
def gated_backward_(
    gate: Tensor, up: Tensor, da: Tensor, activation: str, s: Tensor, of_gate: Tensor, of_up: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Replace gate and up (..., width), n rows in all, by their gradients, from `da`, that of a = `gated`(gate, up).

    Returns three products in `dtype`, over all rows, with `s`, `of_gate` and `of_up` (n, r), each of its own rank: sᵀ a
    (r, width), dgateᵀ of_gate and dupᵀ of_up (width, r).
    """
    a = gate.new_empty(gate.shape)
    for result, x, factor, gradient in _blocks(a, gate, up, da):
        activated, of_activated = _ACTIVATE[activation](x, torch.empty_like(x)), gradient * factor
        _ACTIVATE_BACKWARD[activation](of_activated, x, x)
        torch.mul(activated, factor, out=result)
        torch.mul(activated, gradient, out=factor)
    a, dgate, dup = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (a, gate, up))
    return product(s.t(), a, dtype), product(dgate.t(), of_gate, dtype), product(dup.t(), of_up, dtype)


@_fake(gated_backward_)
def _(
    gate: Tensor, up: Tensor, da: Tensor, activation: str, s: Tensor, of_gate: Tensor, of_up: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width = gate.shape[-1]
    return (
        s.new_empty(s.shape[1], width, dtype=dtype),
        *(low.new_empty(width, low.shape[1], dtype=dtype) for low in (of_gate, of_up)),
    )


@_operator(
    "(Tensor(a!) out, Tensor packed, Tensor absmax, int blocksize, str quant_type, "
    "Tensor? absmax_code=None, Tensor? absmax_scale=None, Tensor? absmax_offset=None, int absmax_blocksize=256, "
    "int? inputs=None, Tensor? beside=None, int at=0) -> ()"
)
def decode_4bit_(
    out: Tensor, packed: Tensor, absmax: Tensor, blocksize: int, quant_type: str,
    absmax_code: Tensor | None = None, absmax_scale: Tensor | None = None, absmax_offset: Tensor | None = None,
    absmax_blocksize: int = 256, inputs: int | None = None, beside: Tensor | None = None, at: int = 0,
) -> None:  # fmt: skip
    """Write the values of an NF4 or FP4 weight into `out` (outputs, inputs), equal to bitsandbytes' to the bit.

    `packed` holds two codes a byte, the first in the upper four bits, and `absmax` the scale of each `blocksize`
    values: in float32, or in 8 bits with its own code (256), scales in float32 and offset (nested quantization).

    With `inputs`, `out` has further columns: zeros, but for a factor `beside` (outputs, r) from the one with the number
    `at`.
    """
    weight = out[:, :inputs]
    if absmax_code is not None:
        absmax = torch.ops.bitsandbytes.dequantize_blockwise(
            absmax, absmax_scale, absmax_code, absmax_blocksize, torch.float32
        )
        absmax += absmax_offset
    weight.copy_(torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, blocksize, quant_type, weight.shape, out.dtype))
    if inputs is not None:
        _write_beside(out[:, inputs:], beside, at)


def _write_beside(columns: Tensor, factor: Tensor | None, at: int) -> None:
    """Write a factor (outputs, r) into `columns` (outputs, columns) from number `at` on, and zeros into the others."""
    own = slice(at, at if factor is None else at + factor.shape[1])
    for rest in (columns[:, : own.start], columns[:, own.stop :]):
        if rest.shape[1]:
            rest.zero_()
    if factor is not None:
        columns[:, own].copy_(factor)


@_operator("(Tensor(a!) out, Tensor codes, Tensor scales) -> ()")
def decode_int8_(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the values of an 8-bit weight into `out` (outputs, inputs): codes * (scales / 127), one scale an output.

    Equal to `model.structure.eight_bit.dequantized` to the bit.
    """
    torch.mul(codes, scales.unsqueeze(1) * (1 / 127), out=out)


@_operator("(Tensor(a!) out, Tensor codes, Tensor scales, str form) -> ()", "decoding_kernels")
def decode_packed_(out: Tensor, codes: Tensor, scales: Tensor, form: str) -> None:
    """Write the values of a weight in a form into `out` (..., rows, columns)."""
    packed_weights.decode(form, codes, scales, out)


@_operator("(Tensor(a!) out, Tensor left, Tensor right, Tensor? bias=None, float scale=1.0) -> ()", "")
def multiply_(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> None:
    """Write scale * left right + bias (columns) into `out`."""
    if _is_native(left.is_cpu, left.dtype):
        torch.addmm(out if bias is None else bias, left, right, beta=0 if bias is None else 1, alpha=scale, out=out)
        return
    wide = left.float() @ right.float()
    wide = wide.mul_(scale) if scale != 1 else wide
    out.copy_(wide if bias is None else wide.add_(bias))


@_operator("(Tensor(a!) total, Tensor left, Tensor right) -> ()", "")
def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left right to `total`, which may be in float32 beside factors of 16 bit."""
    if total.dtype is not left.dtype and left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif total.dtype is not left.dtype:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    elif _is_native(left.is_cpu, left.dtype):
        total.addmm_(left, right)
    else:
        total.add_(left.float() @ right.float())


@_operator("(Tensor(a!) out, Tensor left, Tensor right, int end) -> ()")
def multiply_joined_(out: Tensor, left: Tensor, right: Tensor, end: int) -> None:
    """Write left right into `out`: the products of two pairs side by side, which end and begin at column `end`.

    A CPU adds the first to the second, as it does where they lie apart, so that the sum is the same to the bit.
    """
    multiply_(out, left[:, end:], right[end:])
    add_product_(out, left[:, :end], right[:end])


@_operator("(Tensor left, Tensor right, ScalarType dtype) -> Tensor")
def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left right in `dtype`. On CUDA its sums of 16-bit factors are float32's; a CPU may round them on the way."""
    if _is_native(left.is_cpu, left.dtype):
        return torch.mm(left, right).to(dtype)
    return (left.float() @ right.float()).to(dtype)


@_fake(product)
def _(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=dtype)


@functools.cache
def _is_native(on_cpu: bool, dtype: torch.dtype) -> bool:
    """Whether the device has instructions for products of `dtype`: every GPU, and not every CPU.

    Without them oneDNN emulates such products: 6 to 9 times slower than float32 copies and their product, which also
    rounds less (torch 2.13 on AVX-512 without BF16, 512 to 2,048 rows, 2026-11).
    """
    unit = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}.get(dtype)
    return not on_cpu or unit is None or bool(torch.cpu.get_capabilities().get(unit))


# Values of a block of logits. Smaller ones are no faster (2**16 to 2**20, 2026-11), and a trace goes through them all.
_LOGITS = 2**20


@_operator(
    "(Tensor(a!) sums, Tensor logits, Tensor labels, int start, float scale, float? softcap, float inverse) -> ()",
    without_triton=True,
)
def fold_logits_(
    sums: Tensor, logits: Tensor, labels: Tensor, start: int, scale: float, softcap: float | None, inverse: float
) -> None:
    """Add a tile of logits, the words from `start` on, to what is known of each token's.

    `sums` (3, tokens): the largest logit, the sum of exponentials of the others less this, and the logit of the label.
    `logits` (tokens, columns) are as the head's product gives them; see `kernels.head` for the constants, of which
    `inverse` is 1 / temperature.
    """
    for values, known, label in _blocks(logits, sums.t(), labels.unsqueeze(1), values_each=_LOGITS):
        largest, total, of_label = known.unbind(1)
        z = values.to(sums.dtype)
        z = z * scale if scale != 1 else z
        z = torch.tanh(z / softcap).mul_(softcap) if softcap is not None else z
        z = z * inverse if inverse != 1 else z
        new = torch.maximum(largest, z.amax(1))
        total.mul_(torch.exp(largest - new)).add_(torch.exp_(z - new.unsqueeze(1)).sum(1))
        largest.copy_(new)
        column, inside = _columns(label, start, z.shape[1])
        of_label.copy_(torch.where(inside, z.gather(1, column), of_label.unsqueeze(1)).squeeze(1))


@_operator(
    "(Tensor(a!) logits, Tensor labels, Tensor log_z, Tensor outer, int start, float scale, float? softcap, "
    "float inverse) -> ()",
    without_triton=True,
)
def unfold_logits_(
    logits: Tensor, labels: Tensor, log_z: Tensor, outer: Tensor, start: int, scale: float, softcap: float | None,
    inverse: float,
) -> None:  # fmt: skip
    """Replace a tile of logits by the gradient of `outer` (tokens,) times the log-probabilities, as of the product.

    `log_z` (tokens,) is the logarithm of the sum of exponentials of all a token's logits. Otherwise as `fold_logits_`.
    """
    columns = labels.unsqueeze(1), log_z.unsqueeze(1), outer.unsqueeze(1)
    for values, label, log_sum, factor in _blocks(logits, *columns, values_each=_LOGITS):
        z = values.to(log_z.dtype)  # over the logits themselves, if they are of this type
        z = z.mul_(scale) if scale != 1 else z
        slope = None
        if softcap is not None:
            z.div_(softcap).tanh_()
            slope = 1 - z * z
            z.mul_(softcap)
        z = z.mul_(inverse) if inverse != 1 else z
        z.sub_(log_sum).exp_()
        column, inside = _columns(label, start, z.shape[1])
        z.scatter_add_(1, column, -inside.to(z.dtype))
        z.mul_(factor * (-scale * inverse))
        if slope is not None:
            z *= slope
        if z.dtype is not values.dtype:
            values.copy_(z)


def _columns(labels: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """The columns of labels in a tile of `count` that begins with the word `start`, and whether they are in it."""
    local = labels - start
    return local.clamp(0, count - 1), (local >= 0) & (local < count)


def decode_(
    out: Tensor, weight: Tensor, inputs: int | None = None, beside: Tensor | None = None, at: int = 0
) -> None:  # fmt: skip
    """Write the values of a weight, quantized or not, into `out` (outputs, inputs), and others as `decode_4bit_`."""
    whole = out
    out = whole[:, :inputs]
    if (how := packing_of(weight)) is not None:
        decode_packed_(out.mT if how.transposed else out, weight.data, how.scales, how.form)
    elif (scales := getattr(weight, "SCB", None)) is not None:
        decode_int8_(out, weight.data, scales)
    elif (state := getattr(weight, "quant_state", None)) is not None:
        nested = [None, None, None, 256]
        if state.nested:
            nested = [state.state2.code, state.state2.absmax, state.offset, state.state2.blocksize]
        decode_4bit_(
            whole, weight.data, state.absmax, state.blocksize, state.quant_type, *nested, inputs, beside, at
        )  # fmt: skip
        return
    else:
        out.copy_(weight)
    if inputs is not None:
        _write_beside(whole[:, inputs:], beside, at)


# Values of a block: few enough that intermediate results stay in a core's cache.
_BLOCK = 2**16


def _blocks(*tensors: Tensor, values_each: int = _BLOCK) -> Iterable[tuple[Tensor, ...]]:
    """Rows of tensors (..., width), a block at a time; all at once if few, or if no view (n, width) is possible."""
    first = tensors[0]
    if first.numel() <= values_each:
        return [tensors]
    try:
        rows = [tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    except (RuntimeError, ValueError):  # the latter of tensors without values, in a forecast
        return [tensors]
    each = max(values_each // first.shape[-1], 1)
    return zip(*(tensor.split(each) for tensor in rows), strict=True)
