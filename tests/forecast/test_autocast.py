"""A trace for a card casts as CUDA's autocast does, by torch's own tables."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from jobs import lacks
from torch.nn import functional

from finetune.forecast import autocast

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
POLICIES = {
    "AT_FORALL_FP32": autocast.FLOAT32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": autocast.FLOAT32_RESULT,
    "AT_FORALL_PROMOTE": autocast.WIDEST,
}
IMAGES = "upsample"


def names(macro: str) -> set[str]:
    """The operators that torch's header lists under a policy."""
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)
    listed = re.findall(r"_\(([^()]+)\)", body[1])
    return {".".join(part.strip() for part in name.split(",")) for name in listed}


def has_rule(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


@lacks(reason="torch 2.11 also casts rms_norm")
def test_every_operator_that_only_cuda_casts_is_in_the_table_of_its_policy() -> None:
    for macro, table in POLICIES.items():
        expected = {name for name in names(macro) if not has_rule(name, "AutocastCPU") and IMAGES not in name}
        assert set(table) == expected, macro
        assert all(has_rule(name, "AutocastCUDA") for name in expected), macro


def test_norms_have_a_policy_of_their_own() -> None:
    assert all(has_rule(name, "AutocastCUDA") for name in autocast.FLOAT32_OVERLOAD)
    half = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    with autocast.as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        for found in (torch.ops.aten.norm.Scalar(half, 2), torch.ops.aten.norm.ScalarOpt_dim(half, 2, [0])):
            assert found.dtype is torch.float32
            assert found.item() == 5
        assert torch.ops.aten.norm.Scalar(half.double(), 2).dtype is torch.float64


def test_casts_apply_only_in_the_context_and_under_autocast() -> None:
    half = torch.rand(4, 4, dtype=torch.bfloat16)

    def types() -> set[torch.dtype]:
        norm = functional.layer_norm(half, (4,))
        found = (half**3, torch.rsqrt(half), norm, half.softmax(-1), half.sum(), half.cumsum(0))
        return {one.dtype for one in found}

    with torch.autocast("cpu", torch.bfloat16):
        assert types() == {torch.bfloat16}
        with autocast.as_on_cuda():
            assert types() == {torch.float32}
            assert functional.softmax(half, -1, dtype=torch.bfloat16).dtype is torch.bfloat16, "as the call says"
            assert torch.softmax(half, -1, torch.bfloat16).dtype is torch.bfloat16
            assert (half @ half).dtype is torch.bfloat16
            assert (half.double() ** 3).dtype is torch.float64
            assert torch.addcmul(half, half, half.float()).dtype is torch.float32
        assert types() == {torch.bfloat16}
    with autocast.as_on_cuda():
        assert types() == {torch.bfloat16}


def test_gradients_flow_through_the_casts() -> None:
    start = torch.rand(4, 4, dtype=torch.bfloat16)
    plain, ours = (start.clone().requires_grad_() for _ in range(2))
    (plain.float() ** 3).sum().backward()
    with autocast.as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        (ours**3).sum().backward()
    assert torch.equal(ours.grad, plain.grad)
    assert ours.grad.dtype is torch.bfloat16
