"""What the CPU's kernels are said to allocate within is what they do, by the profiler."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from traces import profiled

from finetune.forecast import operator_costs

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
flash = aten._scaled_dot_product_flash_attention_for_cpu.default
SLACK_BYTES = 4096
"""Scalars, and sums of single rows."""
# There oneDNN packs blocks of the right operand, tens to hundreds of KiB here, which the forecast leaves out but for
# products of two matrices, which it asks about.
PACKS = bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def some(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def heads(tokens: int, count: int = 4, dtype: torch.dtype = BF16) -> torch.Tensor:
    """(1, heads, tokens, 32), heads side by side as projections leave them."""
    return some(1, tokens, count, 32, dtype=dtype).transpose(1, 2)


def beside(rows: int, width: int, room: int, count: int) -> torch.Tensor:
    """A matrix with room beside it, of which `count` columns are taken (see `kernels.room`)."""
    return some(rows, width + room)[:, :count]


OPERATORS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "product": (aten.mm.default, (some(512, 128), some(128, 704))),
    "product with a weight by columns": (aten.mm.default, (some(512, 128), some(704, 128).t())),
    "product into a tile": (aten.mm.out, (some(32, 128), some(128, 2048))),
    "product in float32": (aten.mm.default, (some(512, 128, dtype=FP32), some(128, 704, dtype=FP32))),
    "linear": (aten.linear.default, (some(2, 256, 128), some(704, 128))),
    "with bias": (aten.addmm.default, (some(704), some(512, 128), some(128, 704))),
    "with a low-rank product beside it": (aten.addmm.out, (some(512, 128), beside(512, 352, 16, 368), some(368, 128))),
    "added": (aten.addmm_.default, (some(512, 704), some(512, 160), some(160, 704))),
    "product of two types": (aten.mul.out, (some(512, 512), some(512, 1, dtype=FP32))),
    "batch": (aten.bmm.default, (some(4, 512, 32), some(4, 32, 512))),
    "batch of heads": (aten.bmm.default, (heads(512)[0], heads(512)[0].mT)),
    "batch of heads in float32": (aten.bmm.default, (heads(512, dtype=FP32)[0], heads(512, dtype=FP32)[0].mT)),
    "attention": (flash, (heads(512), heads(512), heads(512), 0.0, True)),
    "attention over a long row": (flash, (heads(2048), heads(2048), heads(2048), 0.0, True)),
    "attention in float32": (flash, (*[heads(512, dtype=FP32)] * 3, 0.0, True)),
    "attention, shared keys": (flash, (heads(128), heads(128, 2), heads(128, 2), 0.0, True)),
    "attention over a short row": (flash, (heads(63), heads(63), heads(63), 0.0, True)),
    "attention, an odd row": (flash, (heads(2001), heads(2001, 1), heads(2001, 1), 0.0, True)),
    "attention of few tokens to many": (flash, (heads(64), heads(2048), heads(2048), 0.0, True)),
    "attention of few tokens to all of many": (flash, (heads(64), heads(2048), heads(2048), 0.0, False)),
    "softmax": (aten._safe_softmax.default, (some(1, 4, 256, 256), -1)),
    "scatter": (aten.scatter.src, (some(512, 512), -1, torch.zeros(512, 1, dtype=torch.int64), some(512, 1))),
    "sum of two types": (aten.add.Tensor, (some(512, 512), some(512, 512, dtype=FP32))),
    "masked": (aten.masked_fill.Scalar, (some(512, 512, dtype=FP32), torch.zeros(512, 512, dtype=torch.bool), -1.0)),
    "chosen": (aten.where.self, (torch.zeros(512, 512, dtype=torch.bool), some(512, 512), some(512, 512))),
}


def written(operator: Any, arguments: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The result that an operator is given to write into, in the type that it computes in."""
    if not operator.name().endswith(".out"):
        return {}
    made = operator.overloadpacket(*arguments)
    return {"out": torch.empty_like(made)}


def scratch(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
    """Bytes of the peak within the real operator beyond what stays."""
    operator(*arguments, **named)  # what is made once is no part of it
    live = [0, *itertools.accumulate(profiled(lambda: operator(*arguments, **named)))]
    return max(live) - live[-1]


def assert_forecast(operator: Any, arguments: tuple[Any, ...], packed: torch.Tensor) -> None:
    """That the scratch is forecast, but for less than a copy of `packed` on a CPU with a unit for bfloat16."""
    named = written(operator, arguments)
    forecast = sum(operator_costs.cpu().scratch(operator, arguments, named))
    real = scratch(operator, arguments, named)
    if PACKS and packed.dtype is BF16:
        assert forecast - SLACK_BYTES <= real <= forecast + packed.numel() * packed.itemsize + SLACK_BYTES
    else:
        assert forecast == pytest.approx(real, abs=SLACK_BYTES)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_scratch_of_a_cpu_kernel_is_what_the_real_one_allocates(name: str) -> None:
    operator, arguments = OPERATORS[name]
    assert_forecast(operator, arguments, arguments[-1] if operator is aten.bmm.default else torch.empty(0))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_scratch_of_a_norm_in_float32_is_a_copy_of_what_is_in_16_bit(dtype: torch.dtype) -> None:
    operator, arguments = aten.linalg_vector_norm.default, (some(512, 512, dtype=dtype), 2, [-1])
    named = {"dtype": FP32}
    forecast = sum(operator_costs.cpu().scratch(operator, arguments, named))
    assert forecast == pytest.approx(scratch(operator, arguments, named), abs=SLACK_BYTES)
    assert forecast == (4 * 512 * 512 if dtype is BF16 else 0)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("tokens", [128, 512, 1024])
def test_the_scratch_of_attentions_backward_pass_is_what_the_real_one_allocates(
    tokens: int, dtype: torch.dtype
) -> None:
    query = heads(tokens, dtype=dtype)
    out, lse = flash(query, query, query, 0.0, True)
    for gradient in (torch.randn_like(query), torch.randn(query.shape).to(dtype)):  # the second lies otherwise
        arguments = (gradient, query, query, query, out, lse, 0.0, True)
        assert_forecast(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, arguments, query)
