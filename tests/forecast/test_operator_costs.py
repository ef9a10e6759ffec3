"""What libraries decide by the device, a trace for a card decides as there."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from jobs import lacks

from finetune.config import AdapterSection, ModelSection, QuantizationSection
from finetune.forecast import operator_costs
from finetune.model.adapters import adapter
from finetune.model.base import load_base

CARD = operator_costs.cuda()


def adapted(section: AdapterSection, kind: Any) -> Any:
    base = load_base(
        ModelSection(weights="random"), QuantizationSection(kind=kind), tiny_models.architecture(layers=1),
        attention="sdpa", dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    return adapter.attach(base, section, "tiny", 1)


def input_type_of_adapter(model: Any) -> torch.dtype:
    """The type in which the first adapter meets its input, under autocast."""
    found: list[torch.dtype] = []
    layer = next(module for name, module in model.named_modules() if name.endswith("q_proj.lora_A.default"))
    handle = layer.register_forward_hook(lambda module, args, output: found.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    handle.remove()
    return found[-1]


@pytest.mark.parametrize("dora", [False, True])
def test_peft_casts_no_input_on_a_4_bit_base_on_a_card_and_each_on_a_cpu(dora: bool) -> None:
    model = adapted(AdapterSection(dora=dora), "nf4")
    assert input_type_of_adapter(model) is torch.float32
    with CARD.as_there():
        assert input_type_of_adapter(model) is torch.bfloat16
    assert input_type_of_adapter(model) is torch.float32


def test_autocast_is_asked_about_by_any_name_and_answers_for_the_device_of_the_trace() -> None:
    with CARD.as_there():
        assert not torch.is_autocast_enabled()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_enabled("cuda"), "nothing is on CUDA, as checkpointing must find"
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.is_autocast_enabled()


def test_torch_optimizers_and_clipping_take_lists_on_a_card() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.utils import clip_grad

    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(3)) for _ in range(2)]
    device = torch.device("cpu")
    assert not clip_grad._has_foreach_support(weights, device)
    with CARD.as_there():
        assert clip_grad._has_foreach_support(weights, device)
    plain, fused = torch.optim.SGD(weights), torch.optim.AdamW(weights, fused=True)
    for optimizer in (plain, fused):
        operator_costs.take_at_once(optimizer)
    assert plain.param_groups[0]["foreach"]
    assert not fused.param_groups[0]["foreach"]


def test_an_optimizer_takes_shards_one_by_one_on_a_card_too() -> None:
    class Shard(torch.nn.Parameter):
        pass

    optimizer = torch.optim.SGD([Shard(torch.empty(3))])
    operator_costs.take_at_once(optimizer)
    assert optimizer.param_groups[0]["foreach"] is None


@pytest.mark.parametrize(("tokens", "padded"), [(24, 24), (30, 32), (25, 32)])
def test_a_mask_is_padded_to_rows_of_a_multiple_of_8(tokens: int, padded: int) -> None:
    rows, heads, size, two_bytes = 2, 4, 64, 2
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.empty(rows, heads, tokens, size, dtype=torch.bfloat16)
    mask = torch.empty(rows, 1, tokens, tokens, dtype=torch.bfloat16)
    output = query
    scratch = sum(CARD.scratch(attend, (query,) * 3, {"attn_mask": mask}))
    copy = rows * tokens * padded * two_bytes if padded != tokens else 0
    # Mask and copy, then copy and output; the trace has mask and output throughout.
    assert mask.nbytes + output.nbytes + scratch == max(mask.nbytes + max(copy, output.nbytes), copy + output.nbytes)
    assert CARD.scratch(attend, (query,) * 3, {}) == []
    assert CARD.scratch(attend, (query,) * 3, {"attn_mask": None}) == []


@lacks(reason="torch 2.11 names the limits of buckets nowhere")
@pytest.mark.parametrize(
    "sizes", [(300_000, 100_000, 10, 7_000_000, 50, 3_000_000, 900_000), (5,), (70_000_000, 1, 70_000_000), (1,) * 40]
)
def test_buckets_are_those_that_torch_makes(sizes: tuple[int, ...]) -> None:
    import torch.distributed
    from torch.nn.parallel.distributed import _BucketCapacityConfig

    weights = [torch.empty(size, device="meta") for size in sizes]
    caps = _BucketCapacityConfig.create(bucket_cap_mb=None, bucket_cap_mb_list=None, use_python_reducer=False)
    limits = [caps.first_bucket_bytes_cap, caps.bucket_bytes_cap]

    def made(tensors: list[torch.Tensor], limits: list[int]) -> list[int]:
        buckets, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits, [])
        return [sum(tensors[number].nbytes for number in bucket) for bucket in buckets]

    in_bytes = [weight.nbytes for weight in weights]
    assert operator_costs.gradient_buckets(in_bytes) == made(weights[::-1], limits)
    assert operator_costs.broadcast_buckets(in_bytes) == made(weights, [250 * 1024 * 1024])


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.5)])
def test_causal_attention_computes_half_of_the_scores_on_a_card(causal: bool, share: float) -> None:
    rows, heads, tokens, size = 2, 4, 64, 16
    query = torch.empty(rows, heads, tokens, size)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    square = 4 * rows * heads * tokens**2 * size
    found = CARD.flops[name](query, query, query, 0.0, causal, out_val=(query, query))
    back = CARD.flops[f"{name}_backward"](*(query,) * 6, 0.0, causal, out_val=(query,) * 3)
    assert (found, back) == (share * square, 2.5 * share * square)


@pytest.mark.parametrize(("start", "end", "step"), [(0, 3, 1), (2, 2**63 - 1, 1), (1, 6, 2)])
def test_the_gradient_of_a_slice_is_what_autograd_makes_of_it(start: int, end: int, step: int) -> None:
    gradient = torch.randn(len(range(start, min(end, 7), step)), 4).t()
    expected = torch.ops.aten.slice_backward(gradient, (4, 7), 1, start, end, step)
    assert torch.equal(CARD.python["aten::slice_backward"](gradient, (4, 7), 1, start, end, step), expected)
