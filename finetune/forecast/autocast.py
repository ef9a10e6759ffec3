"""CUDA's autocast rules for CPU tensors: which operators compute in float32 depends on the device.

A trace runs on fake CPU tensors. Of the operators that a language model calls, autocast runs the same ones in 16 bit on
both devices; but CUDA's autocast runs some in float32, such as `pow`, `rsqrt`, `softmax` and `layer_norm`, that the
CPU's leaves in 16 bit (torch 2.13, aten/src/ATen/autocast_mode.h and autocast_mode.cpp).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from finetune.forecast import operators
from finetune.runtime import patches

# Policy `fp32`: 16-bit inputs become float32.
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist",
    "pdist", "renorm", "logsumexp",
)  # fmt: skip
# Policy `fp32_set_opt_dtype`: the result is float32 where the call names no type; the input stays as it is.
FLOAT32_RESULT = (
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
# Policy `fp32_append_dtype`: the same by another overload, which takes the type.
FLOAT32_OVERLOAD = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
# Policy `promote`: inputs of several types take the widest.
WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add")

_HALVES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within the block autocast casts CPU tensors as it casts those of CUDA."""
    library = patches.AUTOCAST_KERNELS.kernels("AutocastCPU")
    for names, kernel in (
        (FLOAT32, _widened), (FLOAT32_RESULT, _to_float32), (FLOAT32_OVERLOAD, _by_overload),
        (WIDEST, functools.partial(_widened, beside_float32=True)),
    ):  # fmt: skip
        for name in names:
            library.impl(name, kernel(operators.find(f"aten::{name}")))
    try:
        yield
    finally:
        del library  # and with it the kernels


def _widened(operator: Any, *, beside_float32: bool = False) -> Callable[..., Any]:
    """The operator on float32 copies of its 16-bit inputs; with `beside_float32` only where another is in float32."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not beside_float32 or any(
            isinstance(value, torch.Tensor) and value.dtype is torch.float32 for value in args
        ):
            args = tuple(
                value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value for value in args
            )
        with _once():
            return operator(*args, **kwargs)

    return call


def _to_float32(operator: Any) -> Callable[..., Any]:
    index = [argument.name for argument in operators.schema(operator).arguments].index("dtype")

    def call(*args: Any, **kwargs: Any) -> Any:
        named = args[index] if len(args) > index else kwargs.get("dtype")
        if named is None and args[0].dtype in _HALVES:
            args, kwargs = args[:index], {**kwargs, "dtype": torch.float32}
        with _once():
            return operator(*args, **kwargs)

    return call


def _by_overload(operator: Any) -> Callable[..., Any]:
    name = operator.name().removeprefix("aten::")
    typed = operators.find(f"aten::norm.{FLOAT32_OVERLOAD[name]}")
    arguments = operators.schema(operator).arguments
    left_out = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def call(*args: Any, **kwargs: Any) -> Any:
        with _once():
            if args[0].dtype not in _HALVES:
                return operator(*args, **kwargs)
            given = dict(zip((argument.name for argument in arguments), args, strict=False))
            return typed(**{**left_out, **given, **kwargs}, dtype=torch.float32)

    return call


def _once() -> torch.autocast:
    """Call the operator's own kernel, past autocast."""
    return torch.autocast("cpu", enabled=False)
