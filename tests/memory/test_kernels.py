"""What libraries decide by the device, a trace for a card decides as there."""

from __future__ import annotations

from typing import Any

import pytest
import rehearsals
import torch

from finetune.config import AdapterSection, ModelSection, QuantizationSection
from finetune.memory import kernels
from finetune.model import adapter
from finetune.model.base import load_base

CARD = kernels.cuda((8, 9))


def adapted(section: AdapterSection, kind: Any) -> Any:
    base = load_base(
        ModelSection(weights="random"), QuantizationSection(kind=kind), rehearsals.architecture(layers=1),
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
    from torch.optim.optimizer import _default_to_fused_or_foreach
    from torch.utils._foreach_utils import _has_foreach_support

    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(3)) for _ in range(2)]
    device = torch.device("cpu")
    assert _default_to_fused_or_foreach(weights, differentiable=False) == (False, False)
    assert not _has_foreach_support(weights, device)
    with CARD.as_there():
        assert _default_to_fused_or_foreach(weights, differentiable=False) == (False, True)
        assert _has_foreach_support(weights, device)
