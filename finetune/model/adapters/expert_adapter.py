"""LoRA on the experts of a layer: the low-rank terms of all experts in one grouped product for each of A and B.

PEFT (0.21, `ParamWrapper`) adds BA to the weights of all experts before each pass, which takes another copy of them and
of their gradient. Here the experts' code multiplies by `LowRankSum` instead, which adds the low-rank term to the result
of each product, with the tokens sorted by expert as that code has sorted them.

The weights of experts may be stored in any form. An adapter needs `experts.shape` of the parameter, and in the forward
pass of the module, once its pre-hooks have run, the decoded weights as its attribute.

    E experts, T tokens of all experts, r rank; weights are (E, out, in), or (E, in, out) in a transposed class
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from peft.tuners.lora import layer as peft_layer
from torch import nn
from torch.nn import functional

from finetune.model.structure import experts

# Strides of the operands of CUDA's grouped product are multiples of 16 bytes (torch 2.13, `check_valid_strides`).
_STRIDE_BYTES = 16
_RIGHT_PRODUCTS = {
    torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm,
    torch.Tensor.__matmul__, functional.grouped_mm, torch._grouped_mm,  # noqa: SLF001
}  # fmt: skip
"""Functions of (x, weight, ...) that return x @ weight, for each expert."""


class ParamWrapper(peft_layer.ParamWrapper):
    """PEFT's adapter of a parameter, with the same tensors, for experts without a copy of their weights.

    It has PEFT's name because PEFT 0.21 recognises a module with several adapted parameters by it.
    """

    in_features: int
    out_features: int
    _did_swap_in_out_features: bool

    def __init__(self, base_layer: Any, adapter_name: str, parameter_name: str, config: Any, **options: Any) -> None:
        self._dropout = config.lora_dropout
        module = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        if self._dropout and len(experts.shape(getattr(module, parameter_name))) == 3:
            config = copy.copy(config)
            config.lora_dropout = 0.0  # PEFT refuses dropout here: its update of a weight has no input
        super().__init__(base_layer, adapter_name, parameter_name, config=config, **options)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        shape = experts.shape(self.get_param())
        self._param_ndim = len(shape)  # PEFT 0.20 does not set it
        if self._param_ndim != 3:
            features: tuple[int, int] = super()._get_in_out_features(module)
            return features
        self.num_experts = shape[0]
        return shape[1], shape[2]

    def update_layer(self, *arguments: Any, **options: Any) -> None:
        # What PEFT does later: 0.20 looks at the number of dimensions of the stored parameter, which may be bytes.
        if self._param_ndim == 3 and not getattr(self.get_base_layer(), "is_transposed", False):
            if not self._did_swap_in_out_features:
                self.in_features, self.out_features = self.out_features, self.in_features
            self._did_swap_in_out_features = True
        super().update_layer(*arguments, **options)

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        active = [name for name in active_adapters if name in self.lora_A]
        if self._param_ndim != 3 or not active:
            with super()._activate_lora(active_adapters):
                yield
            return
        module = self.get_base_layer()

        def enter(*_: Any) -> None:
            # Found before the parameter, which keeps its name and position.
            vars(module)[self.parameter_name] = self._sum(getattr(module, self.parameter_name), active[0])

        hook = module.register_forward_pre_hook(enter)  # after those that decode the weights
        try:
            yield
        finally:
            hook.remove()
            vars(module).pop(self.parameter_name, None)

    def _sum(self, weight: torch.Tensor, adapter: str) -> LowRankSum:
        """`weight`, decoded, with the low-rank term of an adapter."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        down = _operand(a.reshape(self.num_experts, -1, a.shape[1]), weight.dtype)  # (E, r, in)
        up = _operand(b.reshape(b.shape[0], -1, self.num_experts).permute(2, 1, 0), weight.dtype)  # (E, r, out)
        # PEFT names the sides of a weight by its class, transposed or not, which is not always how the code reads it.
        right, left = (down, up.mT) if self._did_swap_in_out_features else (up, down.mT)
        dropout = self._dropout if self.training else 0.0
        return LowRankSum(weight, left, right, self.scaling[adapter], dropout)


class LowRankSum:
    """W + s left right, as the weights of experts in their products; the sum itself is only made for other uses.

    `weight` (E, m, n), or of some experts or one; `left` (E, m, r) and `right` (E, r, n), in its dtype. `dropout`: the
    probability for an input of the low-rank term.
    """

    def __init__(
        self, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float, dropout: float
    ) -> None:
        self._weight, self._left, self._right, self._scale, self._dropout = weight, left, right, scale, dropout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weight, name)  # its shape, dtype or device

    def __getitem__(self, expert: Any) -> LowRankSum:
        return self._of(*(factor[expert] for factor in (self._weight, self._left, self._right)))

    def transpose(self, one: int, other: int) -> LowRankSum:
        """The sum with the last two dimensions swapped."""
        sides = self._weight.dim()
        assert {one % sides, other % sides} == {sides - 2, sides - 1}
        return self._of(self._weight.mT, self._right.mT, self._left.mT)

    def _of(self, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> LowRankSum:
        return LowRankSum(weight, left, right, self._scale, self._dropout)

    def whole(self) -> torch.Tensor:
        """The sum as a tensor."""
        return self._weight + self._scale * (self._left @ self._right)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for a function one of whose arguments is a LowRankSum."""
        named = dict(kwargs or {})
        if len(args) > 1 and isinstance(args[1], cls) and not isinstance(args[0], cls):
            x, weight, *others = args
            if function in _RIGHT_PRODUCTS:
                return weight.product(x, lambda one, other: function(one, other, *others, **named))
            if function is functional.linear:
                bias = others[0] if others else named.get("bias")
                product = weight.transpose(-2, -1).product(x, lambda one, other: functional.linear(one, other.mT))
                return product if bias is None else product + bias
        plain = [one.whole() if isinstance(one, cls) else one for one in args]
        return function(*plain, **{key: one.whole() if isinstance(one, cls) else one for key, one in named.items()})

    def product(self, x: torch.Tensor, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """x @ (W + s left right), by products of two plain tensors."""
        dropped = functional.dropout(x, self._dropout) if self._dropout else x
        # The scale is taken on the narrow side: on the wide one autograd would hold another gradient of its size.
        term = multiply(multiply(dropped, self._left) * self._scale, self._right)
        return multiply(x, self._weight) + term


def _operand(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`factor` (E, r, ...) in `dtype`, contiguous, with rows of zeros up to a rank that grouped products take."""
    factor = factor.to(dtype, memory_format=torch.contiguous_format).contiguous()  # `to` keeps a layout with the dtype
    missing = -factor.shape[1] % (_STRIDE_BYTES // dtype.itemsize)
    return functional.pad(factor, (0, 0, 0, missing)) if missing else factor
