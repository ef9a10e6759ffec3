"""What a process keeps because it shares its steps with another: a copy of all gradients, as forecast."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from children import Children, connect
from traces import profiled

from finetune.forecast import operator_costs


def train(store: str) -> dict[int, int]:
    """Take a model with frozen and trained weights as the trainer does, and step three times, since the buckets are
    made anew after the first. Returns how many blocks of each size are left."""
    connect(store)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300, bias=False) for _ in range(100)))
    model[0].requires_grad_(False)
    rows = torch.ones(1, 300)

    def steps() -> object:
        shared = accelerator.prepare(model)
        for _ in range(3):
            shared.zero_grad()
            shared(rows).sum().backward()
        return shared

    left: collections.Counter[int] = collections.Counter()
    for size_bytes in profiled(steps):
        left[abs(size_bytes)] += 1 if size_bytes > 0 else -1
    accelerator.end_training()
    return left


@pytest.mark.slow
def test_each_of_two_processes_keeps_a_copy_of_all_gradients(children: Children, tmp_path: Path) -> None:
    buckets = operator_costs.gradient_buckets([4 * 300 * 300] * 99)
    assert len(set(buckets)) == 3, "a small one at first, and none as large as a gradient"
    for left in children.call(train, str(tmp_path / "store"), ranks=2):
        assert {size: left.get(str(size)) for size in buckets} == dict.fromkeys(buckets, 1)
