"""Tensors that a checkpointed layer keeps of its forward pass, so that recomputing it costs less.

torch's selective checkpointing keeps the results of the operators listed here, and returns them in the recomputation,
which computes everything else. A fused function consists of several operators: it calls `kept` instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

ATTENTION, PRODUCTS = "attention", "products"
"""Attention's outputs with the log-sum-exp of its scores; the outputs of the matrix products of linear layers."""

_ATTENTION: dict[str, int | None] = {
    "aten::_scaled_dot_product_flash_attention": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 3,
    "aten::_scaled_dot_product_efficient_attention": 5,
    "aten::_scaled_dot_product_cudnn_attention": 5,
    "torch_attn::_varlen_attn": None,
    "flash_attn::_flash_attn_forward": 3,
    "flash_attn::_flash_attn_varlen_forward": 7,
    "flash_attn_3::_flash_attn_forward": None,
    "flash_attn_3::fwd": None,
}
"""The fused attention operators, with the index of the argument that is the probability of dropout."""

_EXPERTS = "aten::_grouped_mm"
_PRODUCTS: dict[str, Callable[[Any], tuple[int, int]]] = {
    "aten::mm": lambda args: args[1].shape[-2:],
    "aten::addmm": lambda args: args[2].shape[-2:],
    "aten::linear": lambda args: args[1].shape[::-1],
    _EXPERTS: lambda args: args[1].shape[-2:],
    "bitsandbytes::gemm_4bit": lambda args: args[2][::-1],
}
"""The matrix products, with a function of their arguments: (inputs, outputs) of the weight."""

# A weight with more outputs per input is a low-rank factor: its product is large to keep and cheap to recompute.
_OUTPUTS_PER_INPUT = 8

_Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


class _KeptProducts:
    """Products that fused functions of one layer kept, in the order of their calls; `again`: it is being recomputed."""

    def __init__(self) -> None:
        self.made: deque[Any] = deque()
        self.again = False


_of_layer: ContextVar[_KeptProducts | None] = ContextVar("_of_layer", default=None)
_in_recomputed: ContextVar[bool] = ContextVar("_in_recomputed", default=False)


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, the pass of a layer that the backward pass computes again; `is_recomputed` is true inside it."""

    def marked(*inputs: Any) -> Any:
        token = _in_recomputed.set(True)
        try:
            return forward(*inputs)
        finally:
            _in_recomputed.reset(token)

    return marked


def is_recomputed() -> bool:
    """Whether the code that runs is part of a layer that the backward pass computes again."""
    return _in_recomputed.get()


def contexts(kinds: Collection[str], biased_experts: bool) -> _Contexts:
    """The contexts of one pass through a layer that keeps these `kinds` of tensors, and of its recomputation.

    Products of `biased_experts` are not kept: transformers (5.24, `_grouped_linear`) adds the biases to them in place,
    and the recomputation would read the sums.
    """
    policy = functools.partial(_policy, kinds, overwritten=(_EXPERTS,) if biased_experts else ())
    first, again = checkpoint.create_selective_checkpoint_contexts(policy)
    results = _KeptProducts() if PRODUCTS in kinds else None
    return _within(first, results, again=False), _within(again, results, again=True)


def keeps_products() -> bool:
    """Whether the code that runs is part of a layer that keeps its products."""
    return _of_layer.get() is not None


def kept(compute: Callable[[], Any]) -> Any:
    """The products that `compute` returns, or in a recomputation those that were kept. They must not be modified."""
    results = _of_layer.get()
    if results is None:
        return compute()
    if results.again:
        return results.made.popleft()
    results.made.append(compute())
    return results.made[-1]


@contextlib.contextmanager
def _within(mode: Any, results: _KeptProducts | None, *, again: bool) -> Iterator[None]:
    if results is not None:
        results.again = again
    token = _of_layer.set(results)
    try:
        with mode:
            yield
    finally:
        _of_layer.reset(token)


def _policy(
    kinds: Collection[str], _: Any, operator: Any, *args: Any, overwritten: Collection[str] = (), **named: Any
) -> CheckpointPolicy:
    name = operator.name()
    if name in overwritten:
        keeps = False
    elif name in _ATTENTION:
        # Dropout draws random numbers, which a recomputation must draw again for later ones to agree.
        index = _ATTENTION[name]
        dropout = index is not None and (args[index] if len(args) > index else named.get("dropout_p", 0.0))
        keeps = ATTENTION in kinds and not dropout
    else:
        keeps = PRODUCTS in kinds and name in _PRODUCTS
        if keeps:
            inputs, outputs = _PRODUCTS[name](args)
            keeps = inputs * _OUTPUTS_PER_INPUT >= outputs
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
