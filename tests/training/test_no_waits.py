"""A step does not wait for the device: nothing in it reads a value back but the few numbers that are recorded, and in
each micro-batch how many tokens have a label, which the head scores alone.
"""

from typing import Any

import pytest
import steps
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_flash_attention_utils

from finetune.model.attention import packing


class Reads(TorchDispatchMode):
    """The operators that a CUDA device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = function is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if by_mask or function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("job", [[], ["data.packing=true"], ["quantization.kind=none", "memory.checkpointing=none"]])
def test_a_step_reads_no_value_back(quick, job: list[str]) -> None:
    more = [
        "kernels.fused=auto",
        "training.batch_size=4",
        "training.micro_batch=2",
        "optimizer.kind=adamw_torch_fused",
        "training.warmup=0",
    ]
    loop = steps.ready(quick(*more, *job))
    loop.progress.total = 9
    data = loop.steps.epoch(0, 0)
    loop.take_step(next(data))
    micro_batches = next(data)
    with Reads() as reads:
        loop.step.forward_backward(micro_batches, 1)
        loop.step.clip()
        loop.step.update()
    states_and_labels = ["aten.index.Tensor"] * 2
    assert reads.found == states_and_labels * len(micro_batches)
    assert any(weight.grad.any() for weight in loop.step.trained())


def test_flash_attention_of_one_row_reads_no_position_back() -> None:
    """transformers would compute in each layer whether positions begin anew, and branch on the tensor."""
    positions = torch.arange(5)[None]
    assert isinstance(modeling_flash_attention_utils._is_packed_sequence(positions, 1), torch.Tensor)
    with packing.known({"input_ids": positions}):
        assert modeling_flash_attention_utils._is_packed_sequence(positions, 1) is False


def test_the_instrument_sees_a_read() -> None:
    with Reads() as reads:
        float(torch.ones(1))
        torch.ones(3)[torch.ones(3) > 0]
    assert len(reads.found) >= 2
